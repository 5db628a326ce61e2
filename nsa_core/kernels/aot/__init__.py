"""Compiles every kernel as the operator would launch it, without a device: `python -m nsa_core.kernels.aot --help`.

- `cases.py`: what is compiled, and the launches of it.
- `resources.py`: one launch hashed and compiled, and what the kernel takes.
- `__main__.py`: the command, and the table of what was compiled before, by the hash of a launch's source and constants.
"""
