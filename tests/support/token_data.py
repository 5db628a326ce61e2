"""Documents in several formats, and a tokenizer that was trained on them; needs no network."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def texts(count: int = 120) -> list[str]:
    """Different texts of a little language that is easy to learn, not only of ASCII characters."""
    return [
        f"Die Katze № {i} saß auf der Matte, {'ja ' * (i % 9)}und {'schlief ' * (1 + i % 5)}." for i in range(count)
    ]


def write(folder: Path, documents: Sequence[str | None], form: str, *, files: int = 3) -> Path:
    """The documents as several files of `form` (parquet, jsonl, txt, txt.gz), in a new folder, which is returned."""
    folder.mkdir(parents=True)
    for number in range(files):
        part = documents[number::files]
        path = folder / f"test-{number}.{form}"  # a name that `datasets` would take for another split
        if form == "parquet":
            pq.write_table(
                pa.table({"text": pa.array(part, pa.string()), "n": range(len(part))}), path, row_group_size=7
            )
        elif form == "jsonl":
            path.write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(part)))
        else:  # a file a document
            for n, text in enumerate(part):
                content = str(text).encode()
                file = path.with_name(f"{n:03d}-{path.name}")
                file.write_bytes(gzip.compress(content) if form == "txt.gz" else content)
    return folder


def make_tokenizer(path: Path, *, size: int = 320, lossless: bool = True) -> Path:
    """A byte-level BPE tokenizer as a file; if it is not lossless, it drops characters that it has never seen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if lossless else []
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))
    return path
