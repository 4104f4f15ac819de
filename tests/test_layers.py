"""Which layer and group a parameter belongs to, on the real architectures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from seismograd.telemetry.layers import Grouping, Place, places
from tests import tiny


def of(model: nn.Module) -> dict[str, Place]:
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return dict(zip(names, places(names), strict=True))


def llama(tied: bool) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def test_qwen3() -> None:
    found = of(tiny.model(layers=12))
    assert found["model.embed_tokens.weight"] == Place("embedding", "embedding")
    assert found["model.layers.11.self_attn.q_proj.weight"] == Place("11", "attention")
    assert found["model.layers.11.self_attn.q_norm.weight"] == Place("11", "norm")
    assert found["model.layers.3.mlp.up_proj.weight"] == Place("3", "mlp")
    assert found["model.layers.3.post_attention_layernorm.weight"] == Place("3", "norm")
    assert found["model.norm.weight"] == Place("norm", "norm")
    assert found["lm_head.weight"] == Place("head", "head")


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied: bool) -> None:
    found = of(llama(tied))
    assert found["model.embed_tokens.weight"] == Place("embedding", "embedding")
    assert ("lm_head.weight" in found) is not tied  # shared weights count once, as the embedding
    assert {place.layer for place in found.values()} == {"embedding", "0", "1", "norm"} | (set() if tied else {"head"})
    assert "other" not in {place.group for place in found.values()}


def test_gpt2() -> None:
    found = of(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)))
    assert found["transformer.wte.weight"] == Place("embedding", "embedding")
    assert found["transformer.wpe.weight"] == Place("embedding", "embedding")
    assert found["transformer.h.1.attn.c_attn.weight"] == Place("1", "attention")
    assert found["transformer.h.1.mlp.c_fc.bias"] == Place("1", "mlp")
    assert found["transformer.h.1.ln_2.weight"] == Place("1", "norm")
    assert found["transformer.ln_f.weight"] == Place("norm", "norm")


def test_lora_keeps_layers_and_groups() -> None:
    from peft import LoraConfig, get_peft_model

    found = of(get_peft_model(tiny.model(layers=3), LoraConfig(target_modules=["q_proj", "down_proj"])))
    assert {(p.layer, p.group) for p in found.values()} == {(str(i), g) for i in range(3) for g in ("attention", "mlp")}


def test_any_module_by_the_documented_rule() -> None:
    found = of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    assert {name: place.layer for name, place in found.items()} == {
        "0.weight": "0", "0.bias": "0", "2.weight": "2", "2.bias": "2"
    }  # fmt: skip
    assert {place.group for place in found.values()} == {"other"}


def test_several_stacks_are_kept_apart() -> None:
    found = places(["model.encoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight", "model.decoder.ln.bias"])
    assert found == [Place("encoder.layers.0", "mlp"), Place("decoder.layers.0", "mlp"), Place("norm", "norm")]


def test_experts_belong_to_their_layer() -> None:
    assert places(["model.layers.4.mlp.experts.7.up_proj.weight"]) == [Place("4", "mlp")]


def test_norms_of_groups_add_up() -> None:
    model = tiny.model()
    names = [name for name, _ in model.named_parameters()]
    grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    per_parameter = np.array([float(grads[name].norm()) for name in names])
    total = float(torch.cat([g.flatten() for g in grads.values()]).norm())
    grouping = Grouping.of(places(names))
    found = dict(zip(grouping.series, grouping.norms(per_parameter, total), strict=True))
    assert found["all", "all"] == total
    mine = torch.cat([g.flatten() for name, g in grads.items() if ".layers.1." in name])
    assert found["1", "all"] == pytest.approx(float(mine.norm()), rel=1e-6)
    mlp = torch.cat([g.flatten() for name, g in grads.items() if ".layers.1.mlp." in name])
    assert found["1", "mlp"] == pytest.approx(float(mlp.norm()), rel=1e-6)
    layers = [value for (layer, group), value in found.items() if group == "all" and layer != "all"]
    assert np.sqrt(np.square(layers).sum()) == pytest.approx(total, rel=1e-6)
