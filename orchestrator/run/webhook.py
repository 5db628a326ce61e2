"""Tells a webhook of a run's end: NO-GO verdicts, what got slower, bad cards; a failure costs the run nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from jobs.schema.states import Origin, Result, RunState
from orchestrator.errors import UserError
from orchestrator.judge.decisions import Decision
from orchestrator.judge.fleet import Level, judge_cards
from orchestrator.report.compare import Change, Side, compare
from orchestrator.settings import LOOPBACK, Settings
from orchestrator.store import Store, queries
from orchestrator.store.records import RunRecord

_TIMEOUT_S = 2.0  # Ray kills a stopped job after three seconds
_MOST = 1_900  # characters of a text: Discord takes 2,000


class _Stay(HTTPRedirectHandler):
    """Follows no redirect: one to https would become a GET without the message, answered as if all were well."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


@dataclass(frozen=True)
class Ended:
    """A run that ended."""

    run: RunRecord
    state: str  # in words
    failed: int  # points
    points: int
    no_go: tuple[str, ...] = ()  # targets with a sentence of the reason
    slower: tuple[str, ...] = ()  # cells that got worse since the run of this name before
    bad_cards: tuple[str, ...] = ()  # that this run, a preflight, found

    def judged(self, store: Store, decisions: Sequence[Decision]) -> Ended:
        """With the run's NO-GO verdicts, the bad cards that it found, and the cells in which its headline quantity is
        worse than in the run of its name, kind and card that was done before it."""
        no_go = (f"{each.name}: {' '.join(each.sentences)}" for each in decisions if each.result is Result.NO_GO)
        found, run_id = replace(self, no_go=tuple(no_go)), self.run.run_id
        if self.run.kind == "preflight":
            cards = [card for card in judge_cards(store) if card.point_id.startswith(f"{run_id}/")]
            bad = ((card, each) for card in cards for each in card.findings if each.level is Level.BAD)
            lines = (f"{card.label} on {card.node}: {each.check} {each.value}, {each.why}" for card, each in bad)
            found = replace(found, bad_cards=tuple(lines))
        runs, figures = queries.runs(store, origin=Origin.MEASURED), queries.headlines(store, [run_id])
        [own] = runs.loc[runs["run_id"] == run_id].to_dict("records")
        same = [runs[name].fillna("") == (own[name] or "") for name in ("name", "kind", "gpu")]
        whole = (runs["ok"] > 0) & (runs["state"] == RunState.DONE)
        before = runs.loc[same[0] & same[1] & same[2] & whole & (runs["created_at"] < own["created_at"])]
        specs = queries.specs(store, before["run_id"].tolist())  # `nsa rerun` measures some points of one alone
        earlier = next((each for each in before["run_id"] if not specs[each].get("only")), None)
        if not figures or earlier is None:
            return found
        try:
            sides = [Side(each, (each,)) for each in (earlier, run_id)]
            [compared] = compare(store, sides[0], sides[1:], figures[run_id]["metric"])
        except UserError:  # the runs have no cell in common
            return found
        slower = []
        for cell in (each for each in compared.cells if each.change in (Change.WORSE, Change.FAILED)):
            values = dict(cell.cell)
            name = " ".join(values[label] for label in ("implementation", "pass", "seq_len") if label in values)
            ratio = f"{cell.ratio:.3g} times" if cell.change is Change.WORSE else cell.note
            slower.append(f"than {earlier}: {compared.quantity.name} of {name}: {ratio}")
        return replace(found, slower=tuple(slower))

    def message(self, url: str) -> dict[str, Any]:
        """JSON for the server at `url`: Discord's or Slack's own form, else all fields with the text that Mattermost
        shows."""
        run, path = self.run, urlsplit(url).path
        lines = [f"{run.run_id}{f' ({run.person})' if run.person else ''}: {self.state}"]
        lines += [f"NO-GO {each}" for each in self.no_go] + [f"slower {each}" for each in self.slower]
        lines += [f"BAD {each}" for each in self.bad_cards]
        text = "\n".join(lines)[:_MOST]
        if "/api/webhooks/" in path and not path.endswith("/slack"):
            return {"content": text, "allowed_mentions": {"parse": []}}
        if path.startswith("/services/"):
            return {"text": text.replace("&", "&amp;").replace("<", "&lt;")}  # <!channel> would call everyone
        about = {name: getattr(run, name) for name in ("run_id", "name", "kind", "person", "git_commit")}
        return {"text": text, **about, **{name: value for name, value in asdict(self).items() if name != "run"}}


def tell(settings: Settings, ended: Ended) -> list[str]:
    """Tell the settings' webhook, if there is one. Returns lines about a failure."""
    if (url := settings.webhook) is None:
        return []
    try:
        content = json.dumps(ended.message(url)).encode()
        request = Request(url, content, {"Content-Type": "application/json", "User-Agent": "nsa-bench"})
        local = urlsplit(url).hostname in (LOOPBACK, "localhost")  # which a proxy does not reach
        with build_opener(_Stay, ProxyHandler({} if local else None)).open(request, timeout=_TIMEOUT_S):
            return []
    except Exception as err:  # whatever it is; only errors of the network say nothing of the URL, which is a secret
        why = str(err) if isinstance(err, OSError) else type(err).__name__
        return [f"NSA_WEBHOOK: was not told of the run's end ({why}); correct it, or remove it"]
