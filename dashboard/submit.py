"""Submit page: a spec, what its dry run says, and the same by `nsa submit`; for those who have the cluster's token.

Whoever submits, or has a spec checked, runs code as the user who started the dashboard. So the page does nothing for
readers, and does not use that user's own token.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import streamlit as st

from dashboard import data, parts
from orchestrator.cli.services import answers
from orchestrator.execute.ray_http import ray_jobs
from orchestrator.judge.rules import READY_SPECS
from orchestrator.settings import Settings, example_spec, load_settings

_COMMAND = (sys.executable, "-c", "from orchestrator.cli.entry import main; main()", "submit")
_LONGEST_S = 300.0


@data.explained
def page() -> None:
    settings = load_settings()
    st.title("Submit")
    ready = sorted(path.name for path in READY_SPECS.glob("*.yaml"))
    name = st.selectbox("Spec", ready, index=ready.index("demo.yaml"), key="spec", bind="query-params")
    content = (READY_SPECS / name).read_text()
    text = st.text_area("Change it, or paste your own", content, height=230, key=f"text-{name}")
    path = example_spec(Path(name).stem) if text == content else "spec.yaml"
    st.code(f"nsa submit {path} --dry-run\nnsa submit {path}", language="bash")
    if text != content:
        st.caption("The same in a shell, where spec.yaml has this text.")
    hint = "`ray get-auth-token` prints it to those who may submit"
    token = st.text_input("The cluster's token", type="password", icon=":material/key:", key="token", help=hint)
    if reason := _refusal(settings, token):
        st.info(reason, icon=":material/lock:")
        return
    person = st.text_input("Your name", max_chars=200, key="person", help="lists of runs show it")
    with st.container(horizontal=True):
        check = st.button("Dry run", icon=":material/checklist:")
        submit = st.button(
            "Submit", icon=":material/send:", type="primary", disabled=st.session_state.get("ok") != text
        )
    if check or submit:
        with st.spinner("Checking" if check else "Submitting"):
            ok, told = _run(READY_SPECS / name if text == content else None, text, token, person, dry=check)
        st.session_state.update(ok=text if check and ok else None, told=told, of=text)
        st.rerun()
    if st.session_state.get("of") == text:
        st.code(st.session_state["told"], language=None, wrap_lines=True)
        st.page_link("now.py", label="What runs and waits", icon=":material/pulse_alert:")


def _refusal(settings: Settings, token: str) -> str | None:
    """Why this reader may not submit; None if the cluster takes the token, and takes no reader without one."""
    cluster = parts.code(settings.ray_dashboard)
    if not token:
        return "Reading needs no token; a dry run and submitting do."
    if not answers(f"{settings.ray_dashboard.rstrip('/')}/api/authentication_mode", '"token"'):
        return (
            f"The cluster at {cluster} does not answer, or asks for no token, so that readers cannot be told apart: "
            "use the command."
        )
    if ray_jobs(settings, token) is None:
        return f"The cluster at {cluster} does not answer, or does not take this token."
    return None


def _run(ready: Path | None, text: str, token: str, person: str, *, dry: bool) -> tuple[bool, str]:
    """Whether `nsa submit` of a ready spec or else of the text succeeded, and what it printed."""
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    if person.strip():  # else the user who started the dashboard
        environment["NSA_PERSON"] = person.strip()
    with tempfile.TemporaryDirectory(prefix="nsa-submit-") as folder:
        path = ready or Path(folder) / "spec.yaml"
        if ready is None:
            path.write_text(text)
        command = [*_COMMAND, str(path), "--dry-run" if dry else "--no-wait"]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S
            )
        except subprocess.TimeoutExpired:
            return False, f"It took longer than {_LONGEST_S:.0f} s; use the command in a shell."
    return done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr).replace(f"{path.parent}/", "")


if __name__ == "__main__":
    page()
