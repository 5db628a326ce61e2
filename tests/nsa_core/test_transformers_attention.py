"""A Llama with NSA layers: loads weights, trains under Trainer, generates with its cache, takes packed sequences."""

from pathlib import Path

import pytest
import torch

from nsa_core import InputError, NSAConfig
from nsa_core.transformers_attention import add_gates, register

transformers = pytest.importorskip("transformers")
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=16)


@pytest.fixture
def llama(tmp_path: Path):
    """Saved with dense attention, loaded with NSA."""
    register(SMALL)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="nsa").eval()


def test_it_generates_with_its_cache_what_it_does_without(llama) -> None:
    tokens = torch.randint(64, (2, 60))
    found = [llama.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*found)
    with pytest.raises(InputError, match=r"^cache: \d+ keys: use a cache that grows"):
        llama.generate(tokens, max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert not torch.allclose(llama(tokens).logits, _dense(llama, tokens))


def _dense(llama, tokens: torch.Tensor) -> torch.Tensor:
    llama.set_attn_implementation("sdpa")
    return llama(tokens).logits


def test_it_trains_its_gates_under_trainer(llama, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    add_gates(llama)
    before = llama.model.layers[0].self_attn.nsa_gates.weight.clone()
    data = [{"input_ids": x, "labels": x} for x in torch.randint(64, (4, 60))]
    settings = {"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    transformers.Trainer(llama, transformers.TrainingArguments(str(tmp_path), **settings), train_dataset=data).train()
    assert not torch.equal(llama.model.layers[0].self_attn.nsa_gates.weight, before)


def test_packed_sequences_are_as_each_alone_and_padding_is_refused(llama) -> None:
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    rows = [torch.randint(64, (length,)) for length in (50, 20)]
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    batch.pop("labels")
    alone = torch.cat([llama(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(llama(**batch).logits[0], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"^position_ids: packed sequences: give their bounds, too"):
        llama(batch["input_ids"], position_ids=batch["position_ids"])
    padded = torch.ones(1, 20, dtype=torch.long)
    padded[0, 0] = 0
    with pytest.raises(InputError, match=r"^attention_mask: \[1, 20\]: pad nothing"):
        llama(rows[1][None], attention_mask=padded)
    with pytest.raises(InputError, match=r"^is_causal: False: use another attention"):
        llama(rows[1][None], is_causal=False)
    llama.config.attention_chunk_size = 8
    llama.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(InputError, match=r"^layer_types: .*chunked_attention.*: use another attention"):
        llama(rows[1][None])
    llama.config.layer_types = None
    llama.model.layers[0].self_attn.is_causal = False
    with pytest.raises(InputError, match=r"^is_causal: False: use another attention"):
        llama(rows[1][None])
