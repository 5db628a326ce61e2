"""Training on the tokens of documents: real files, `datasets` and `tokenizers`, without a network."""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
from token_data import END, make_tokenizer, texts, write
from travelling import CPU, travelled, values_of

from jobs.schema.point import Beat, Machine, Measurement
from jobs.specs.spec import SpecError
from jobs.train import Spec, measure
from jobs.training.checkpoints.saving import packed
from jobs.training.data import debian
from jobs.training.data.corpus import Corpus, DataError, held_out
from jobs.training.data.spec import DataSpec
from jobs.training.data.token_corpus import heldout_texts, load_tokens, open_dataset, read, shuffled
from nsa_core.model import ModelConfig, NSATransformer
from nsa_core.packed_sequences import document_bounds

SILENT: Beat = lambda *_: None  # noqa: E731


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files, of row groups of seven documents."""
    return write(tmp_path_factory.mktemp("documents") / "parquet", texts(), "parquet")


def _data(path: Path, tokenizer: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(path), "tokenizer_path": str(tokenizer), "heldout": 0.2, "heldout_batches": 2} | changes


def _spec(data: dict[str, Any], **changes: Any) -> Spec:
    fields: dict[str, Any] = {"seq_len": 32, "batch": 4, "steps": 25, "device": "cpu", "data": data}
    fields["optimizer"] = {"warmup_steps": 3, "learning_rate": 1e-2}
    return Spec.model_validate({"kind": "train", "name": "t", **fields, **changes})


def _train(spec: Spec) -> Measurement:
    return measure(travelled(spec.points(CPU)[0]), SILENT)


def _corpus(data: dict[str, Any], seed: int = 0) -> Corpus:
    return load_tokens(DataSpec.model_validate(data), 512, 4, 32, seed, SILENT)


def _heldout(spec: DataSpec) -> list[str]:
    return [*heldout_texts(open_dataset(spec), spec, SILENT)]


# Training


def test_a_model_learns_tokens_and_its_size_follows_from_the_tokenizer(documents: Path, tokenizer: Path) -> None:
    spec = _spec(_data(documents, tokenizer))
    point, on_bytes = (each.points(CPU)[0] for each in (spec, _spec({})))
    assert (on_bytes.config["model"]["vocab_size"], point.config["model"]["vocab_size"]) == (256, 320)
    result = _train(spec)
    found, about = values_of(result), result.environment["training"]
    assert found["heldout_loss"] < 0.5 * found["heldout_loss_before"]
    assert abs(found["estimate_error"]) < 10
    assert found["throughput"] == pytest.approx(4 * 32 / found["time"] * 1000, rel=0.2)
    assert about["parameters"] == sum(p.numel() for p in NSATransformer(_model(spec)).parameters())
    assert about["corpus"]["vocabulary"] == 320
    assert about["corpus"]["bytes_a_token"] > 2
    assert about["corpus"]["epochs"] > 1
    assert {m.name: m.unit for m in result.metrics}["heldout_loss"] == "nat/byte"
    methods = {m.name: m.method for m in result.metrics}
    assert "divided by the bytes of their text" in methods["heldout_loss"]
    assert methods["loss"].endswith(f"; in epoch {about['corpus']['epochs']} of the documents")


def _model(spec: Spec) -> ModelConfig:
    return travelled(spec.points(CPU)[0]).model


@pytest.mark.parametrize("pack", [False, True])
def test_losses_are_nats_of_tokens_over_the_bytes_of_their_text(documents: Path, tokenizer: Path, pack: bool) -> None:
    """Counted here by decoding, and with a cross entropy over all logits; of packed documents one by one."""
    spec = _spec(_data(documents, tokenizer, pack=pack), steps=5)
    result = _train(spec)
    torch.manual_seed(0)
    model = NSATransformer(_model(spec)).eval()
    corpus, decoder = _corpus(_data(documents, tokenizer)), tokenizers.Tokenizer.from_file(str(tokenizer))
    end = decoder.token_to_id(END)

    def per_byte(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        nats = size = 0.0
        for tokens, targets in batches:
            bounds = document_bounds(tokens, end).diff().tolist()
            parts = [each[None] for each in tokens.flatten().split(bounds)] if pack else [tokens]
            logits = torch.cat([model(part).flatten(0, 1) for part in parts]).double()
            nats += torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").item()
            ends = int((targets == end).sum())
            size += ends + sum(len(_bytes(decoder, number)) for number in targets.flatten().tolist() if number != end)
        return nats / size

    assert values_of(result)["heldout_loss_before"] == pytest.approx(per_byte(corpus.heldout), rel=1e-5)
    first = next(metric.samples[0] for metric in result.metrics if metric.name == "loss")
    assert first == pytest.approx(per_byte([next(corpus.batches)]), rel=1e-5)


def _bytes(decoder: tokenizers.Tokenizer, number: int) -> str:
    """A character a byte."""
    token = decoder.id_to_token(number)
    assert token is not None
    return token


# Held out


def test_heldout_documents_are_never_trained_on_whatever_file_or_copy_they_are_in(
    tmp_path: Path, tokenizer: Path
) -> None:
    """By content: read back from the batches themselves, over more than an epoch."""
    twice = [*texts(), *reversed(texts())]
    data = _data(write(tmp_path / "twice", twice, "jsonl", files=4), tokenizer)
    spec = DataSpec.model_validate(data)
    heldout = set(_heldout(spec))
    assert 10 < len(heldout) < 40
    decoder, batches = tokenizers.Tokenizer.from_file(str(tokenizer)), _corpus(data).batches
    ids: list[int] = []
    while batches.about["epochs"] < 3:
        ids += next(batches)[0].flatten().tolist()
    seen = set(decoder.decode(ids, skip_special_tokens=False).split(END)[:-1])
    assert seen == set(texts()) - heldout
    other = DataSpec.model_validate(_data(write(tmp_path / "other", texts(), "parquet", files=2), tokenizer))
    assert set(_heldout(other)) == heldout, "neither file, format nor place in it decides"


# Position


@pytest.mark.parametrize("form", ["parquet", "txt.gz"])
def test_a_position_in_the_documents_is_taken_up_again_exactly(tmp_path: Path, tokenizer: Path, form: str) -> None:
    data = _data(write(tmp_path / form, texts(), form), tokenizer)
    batches, states, expected = _corpus(data, 7).batches, [], []
    while batches.about["epochs"] < 3:
        states.append(packed(batches.state_dict()))
        expected.append(next(batches))
    assert len(expected) > 20
    for at in (0, 5, len(states) - 2):
        again = _corpus(data, 7).batches
        state = torch.load(io.BytesIO(states[at]), weights_only=True)
        again.load_state_dict(state)
        assert again.state_dict()["documents"] == state["documents"]
        for (tokens, targets), (right, right_targets) in zip(again, expected[at:], strict=False):
            assert torch.equal(tokens, right)
            assert torch.equal(targets, right_targets)


def test_every_epoch_has_each_document_once_in_an_order_of_its_own_that_the_seed_decides(
    documents: Path, tokenizer: Path
) -> None:
    spec = DataSpec.model_validate(_data(documents, tokenizer))

    def order(seed: int, epoch: int) -> list[str]:
        dataset = shuffled(open_dataset(spec), seed)
        dataset.set_epoch(epoch)
        return [text for text, _ in read(dataset, spec) if text]

    first, second = order(1, 0), order(1, 1)
    assert sorted(first) == sorted(second) == sorted(set(texts()) - set(_heldout(spec)))
    assert first != second
    assert order(1, 0) == first
    assert order(2, 0) != first


def test_few_texts_keep_their_ends(tmp_path: Path, tokenizer: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a" * 90 + str(number) * 10)
    (tmp_path / "README.md").write_text("no document")
    spec = DataSpec.model_validate(_data(tmp_path, tokenizer) | {"heldout": 0.1})
    assert sorted(_heldout(spec)) == [str(number) * 10 for number in range(3)]
    assert {learned for learned, _ in read(open_dataset(spec), spec)} == {"a" * 90}
    assert held_out(spec, 8) == "0.1 of each file, its end"


# Hub


def test_a_dataset_of_the_hub_is_streamed_as_the_spec_names_it(
    documents: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    local = datasets.load_dataset("parquet", data_files=str(documents / "*"), split="train", streaming=True)

    def loaded(*names: str, **options: Any) -> Any:
        asked.append((names, options))
        return local

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    named = {"dataset": "HuggingFaceFW/fineweb-edu", "subset": "sample-10BT", "revision": "abc", "heldout": 0.2}
    corpus = _corpus({**named, "tokenizer_path": str(tokenizer)})
    assert next(corpus.batches)[0].shape == (4, 32)
    options = {"name": "sample-10BT", "split": "train", "revision": "abc", "streaming": True}
    assert asked == [(("HuggingFaceFW/fineweb-edu",), options)]


def test_without_a_network_the_error_names_what_to_give_instead(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", away)
    monkeypatch.setattr(tokenizers.Tokenizer, "from_pretrained", away, raising=False)
    for source, message in (
        (
            {"tokenizer_path": str(tokenizer)},
            r"data\.dataset: 'a/b': cannot be read \(Conn.*\); .*data\.path",
        ),
        ({"tokenizer": "gpt2"}, r"data\.tokenizer: 'gpt2': cannot be loaded \(.*\); .*data\.tokenizer_path"),
    ):
        with pytest.raises(DataError, match=f"^{message}$"):
            _corpus({"dataset": "a/b", **source})


# Mistakes


def _bad(tmp_path: Path, tokenizer: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Data that cannot be learned from, and the line about it."""
    good = write(tmp_path / "good", texts(), "parquet")
    yield _data(good, tokenizer, text_field="body"), r"data\.text_field: 'body': no field of .*use one of 'text', 'n'"
    yield _data(good, tokenizer, text_field="n"), r"data\.text_field: 'n': is int in a document; name a field of text"
    yield _data(good, tokenizer, end_token="</s>"), r"data\.end_token: '</s>': is no token of .*use '<\|endoftext\|>'"
    yield (
        _data(good, tokenizer, heldout=1e-9),
        r"data\.path: .*held-out part has 0 tokens, too few for seq_len 32; give",
    )
    lossy = make_tokenizer(tmp_path / "lossy.json", lossless=False)
    yield _data(good, lossy), r"data\.tokenizer_path: .*lossy\.json': loses or changes bytes of text.*use a byte-level"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.csv").touch()
    yield _data(tmp_path / "empty", tokenizer), r"data\.path: .*empty': has no documents; give .*\.parquet, .*one kind"
    write(tmp_path / "mixed", texts(), "jsonl")
    (tmp_path / "mixed" / "readme.txt").touch()
    yield _data(tmp_path / "mixed", tokenizer), r"data\.path: .*has documents as (json|text) and as (json|text); give"
    with (write(tmp_path / "other", texts(), "jsonl") / "test-2.jsonl").open("a") as file:
        file.write('{"title": "Katze"}\n')
    yield _data(tmp_path / "other", tokenizer), r"data\.path: .*\(fields of one file are not those of the first\); give"
    file = write(tmp_path / "torn", texts(), "parquet", files=1) / "test-0.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(2000) + content[2100:])
    yield _data(tmp_path / "torn", tokenizer), r"data\.path: .*torn': cannot be read \(.*\); mend or remove the file"


def test_packed_documents_are_compiled_on_a_gpu_alone(documents: Path, tokenizer: Path) -> None:
    compiled = _spec(_data(documents, tokenizer, pack=True), compile=True, device="auto")
    with pytest.raises(SpecError, match=r"^compile: true: nsa attention by chunked in .* on cpu .*; leave compile"):
        compiled.points(CPU)
    card = Machine("cuda", "NVIDIA H200", 2**37)
    (point,) = compiled.points(card)
    assert point.label == "nsa tiny S=32 compiled"
    dense = compiled.model_copy(update={"attention": ["dense"]})
    with pytest.raises(SpecError, match=r"^compile: true: dense attention by dense in float32 .* precision: bfloat16$"):
        dense.points(card)
    assert len(dense.model_copy(update={"precision": "bfloat16"}).points(card)) == 1
    with pytest.raises(ValueError, match=r"ranks: 2: packed documents are compiled on one rank alone; leave compile"):
        _spec(_data(documents, tokenizer, pack=True), compile=True, ranks=2)


def test_data_that_cannot_be_learned_from_is_an_error_of_one_line(tmp_path: Path, tokenizer: Path) -> None:
    for data, message in _bad(tmp_path, tokenizer):
        with pytest.raises(DataError, match=f"^{message}[^\n]*$"):
            next(_corpus(data).batches)


def test_a_tokenizer_that_is_another_one_on_the_node_is_refused(documents: Path, tokenizer: Path) -> None:
    spec = DataSpec.model_validate(_data(documents, tokenizer))
    with pytest.raises(DataError, match=r"has 320 tokens, but the model was planned for 256: .*on all hosts$"):
        load_tokens(spec, 256, 4, 32, 0, SILENT)


WORDS = "a line of words that is long enough to be kept\n" * 40


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An unpacked package."""
    folder = tmp_path / "package"
    (folder / "_sources").mkdir(parents=True)
    page = f"<html><head><title>no</title></head><script>no()</script><p>{WORDS}</p><footer>no</footer></html>"
    (folder / "page.html").write_text(page)
    (folder / "notes.txt.gz").write_bytes(gzip.compress(f"notes\n{WORDS}".encode()))
    (folder / "code.c").write_text(f"code\n{WORDS}")
    (folder / "_sources" / "page.rst").write_text(f"again\n{WORDS}")
    (folder / "short.md").write_text("a stub")
    (folder / "latin.txt").write_bytes(b"\xe9" * 2_000)
    (folder / "image.png").write_text(WORDS)
    (folder / "link.txt").symlink_to("code.c")
    return folder


def test_pages_notes_and_sources_become_a_dataset_that_a_training_reads(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(text.split("\n")[0] for text in debian.documents(package)) == [
        "a line of words that is long enough to be kept",
        "code",
        "notes",
    ]
    assert not any("no" in text.split() for text in debian.documents(package))
    monkeypatch.setattr(debian, "VOCABULARY", 300)
    for out in (tmp_path / "one", tmp_path / "two"):
        debian.write([*debian.documents(package)], out)
    assert [path.read_bytes() for path in sorted((tmp_path / "one").rglob("*.*"))] == [
        path.read_bytes() for path in sorted((tmp_path / "two").rglob("*.*"))
    ]
    spec = DataSpec(path=tmp_path / "one" / "text", tokenizer_path=tmp_path / "one" / "tokenizer.json")
    assert spec.vocabulary() == 320  # 300 up to a multiple of 64
