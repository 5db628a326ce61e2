"""A process's limit of memory, its failures, its end with its parent, its stacks and temporary folders."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from processes import is_alive

from jobs.process import post_mortem, temporary
from jobs.process.child import Child, DeadlineWatch, ran_out_of_memory
from jobs.process.messages import Probe

ROOT = Path(__file__).resolve().parents[3]


def python(code: str) -> str:
    """The output of a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_memory_limit_counts_from_the_start_and_ends_with_the_block() -> None:
    output = python(
        """
        from jobs.process.memory_limit import memory_limit
        before = bytearray(300 << 20)                      # in use before: does not count
        with memory_limit("cpu", 200 << 20):
            within = bytearray(100 << 20)
            try:
                beyond = bytearray(150 << 20)
            except MemoryError:
                print("refused")
        after = bytearray(400 << 20)
        print("free again")
        """
    )
    assert output.split("\n")[:2] == ["refused", "free again"]


def test_out_of_memory_errors_are_recognised() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    def raised_from(cause: Exception) -> Exception:
        err = ValueError("while measuring")
        err.__cause__ = cause
        return err

    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(OutOfMemoryError("CUDA out of memory"))
    assert ran_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."))
    assert ran_out_of_memory(raised_from(MemoryError()))
    assert not ran_out_of_memory(RuntimeError("shapes do not match"))
    assert not ran_out_of_memory(raised_from(KeyError("x")))
    assert not ran_out_of_memory(ValueError("CUDA out of memory")), "the text alone does not decide"


FAMILY = """
    import subprocess, time
    from jobs.process.messages import Beat
    def answer(command, channel):
        channel.send(Beat(str(subprocess.Popen(["sleep", "600"]).pid)))
        time.sleep(600)
"""
PARENT = """
    import time
    from jobs.process.child import Child
    from jobs.process.messages import Beat, Probe
    child = Child("family:answer")
    child.send(Probe("cpu"))
    while not (beats := [event for event in child.inbox.receive(0.2) if isinstance(event, Beat)]): pass
    print(child.pid, beats[0].phase, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["unable to act", "killed with it"])
def test_a_process_and_its_group_do_not_outlive_its_parent(how: str, tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(textwrap.dedent(FAMILY))
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child, grandchild = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    if how == "killed with it":  # as Ray ends its worker whose node is lost: the children, but not what they started
        child.kill()
    if how == "unable to act":  # as if stuck in a driver call
        child.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child, grandchild], timeout=10)[1] == []


SHEDDING = """
    import subprocess, sys, threading, time
    from jobs.process.messages import Beat
    def answer(command, channel):
        threading.Thread(target=of_a_thread, args=[channel]).start()
        time.sleep(600)
    def of_a_thread(channel):  # whose children the kernel lists apart from the main thread's
        own = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
        start = "print(subprocess.Popen(['sleep', '600'], start_new_session=True, env={}, stdout=2).pid)"
        daemon = subprocess.run([sys.executable, "-c", f"import subprocess; {start}"], stdout=subprocess.PIPE, env={})
        channel.send(Beat(f"{daemon.stdout.decode().strip()} {own.pid}"))
        time.sleep(600)
"""


def test_daemons_without_the_points_variables_end_with_the_point_that_died(tmp_path: Path) -> None:
    (tmp_path / "shedding.py").write_text(textwrap.dedent(SHEDDING))
    child = Child("shedding:answer", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    watch = DeadlineWatch(child)
    child.send(Probe("cpu"))
    while not watch.phase:
        watch.step()
    daemons = [psutil.Process(int(pid)) for pid in watch.phase.split()]
    assert [daemon.environ() for daemon in daemons] == [{}, {}]
    os.kill(child.pid, signal.SIGKILL)
    child.discard()
    assert not any(map(is_alive, daemons))


COMPILING = """
import time
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from jobs.process import post_mortem
from kernel import copy

def stuck_here():
    print("there", flush=True)
    time.sleep(600)

post_mortem.offer_stacks()
source = ASTSource(copy, signature={"x": "*fp32", "y": "*fp32"}, constexprs={})
compile(source, target=GPUTarget("cuda", 80, 32))
stuck_here()
"""

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def copy(x, y):
    tl.store(y, tl.load(x))
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a module `kernel`, in which nothing has been compiled yet."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


def test_a_process_that_has_compiled_a_kernel_still_writes_its_stacks(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM, by which Triton compiles, takes signals for itself. The stacks are there where py-spy fails, as it did with
    a panic of its own."""
    (kernel / "py-spy").write_text("#!/bin/sh\necho 'std::rt::lang_start'; exit 101\n")
    (kernel / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", str(kernel), prepend=os.pathsep)
    with (kernel / "stderr").open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", COMPILING], stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n", (kernel / "stderr").read_text()
        [text] = post_mortem.dumps([psutil.Process(process.pid)])
        assert "lang_start" in text
        assert "in stuck_here" in text
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


_OWNER = """
import sys
from jobs.process import temporary
for prefix in (temporary.POINT, temporary.RANK):
    folder = temporary.Folder(prefix)
    (folder.path / "tmp").mkdir()
    (folder.path / "tmp" / "record.json").write_text("{}")
    print(folder.path, flush=True)
    temporary.folders = [*getattr(temporary, "folders", []), folder]
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a folder of each sort in a temporary folder of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", _OWNER]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [Path(process.stdout.readline().strip()).parent for _ in range(2)] == [tmp_path] * 2
        yield process
        process.kill()


def test_folders_of_a_killed_process_are_removed_by_the_next(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    running = set(tmp_path.iterdir())
    child = Child("builtins:print")
    assert {path for path in tmp_path.iterdir() if path != child.temporary.parent} == running  # it still runs
    for path in running:
        os.utime(path, (1, 1))
    owner.kill()
    owner.wait()
    assert set(tmp_path.iterdir()) > running
    with closing(temporary.Folder(temporary.RANK)) as folder:
        assert set(tmp_path.iterdir()) == {folder.path, child.temporary.parent}
    child.discard()
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what has another name, nor a folder whose process has not locked it yet, nor what a link leads to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("other", "nsa-point-1", "nsa-point-2"):
        (tmp_path / name).mkdir()
    for name in ("other", "nsa-point-1"):
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "nsa-rank-2").symlink_to(tmp_path / "other")
    (tmp_path / "nsa-rank-3").touch()
    temporary.remove_abandoned()
    assert {path.name for path in tmp_path.iterdir()} == {"other", "nsa-point-2", "nsa-rank-2", "nsa-rank-3"}
