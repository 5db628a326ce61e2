"""On the PYTHONPATH of a process under test: makes the kinds of this folder job kinds. Python runs it at start-up."""

from pathlib import Path

import jobs

jobs.__path__.append(str(Path(__file__).parent))
