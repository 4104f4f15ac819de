"""A random language model of 1M parameters, made in memory: what the tests and `seismograd demo --tiny` train."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

NAME = "random Qwen3, 1M parameters"
_SPECIAL = ["<pad>", "<eos>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerBase:
    """One token a character, without a chat template; pads on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = string.digits + string.ascii_letters + " .,:;?!'\"()=+-*/\n"
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerBase = wrap(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    return wrapped


def model(vocabulary: int, seed: int = 0) -> Qwen3ForCausalLM:
    """A float32 Qwen3 of 4 layers and about 1M parameters in train mode. Leaves torch's global generator as it was.

    Args:
        vocabulary: number of tokens.
        seed: of the weights. Their deviation, 0.2 and so ten times the usual, spreads logits like a trained model's.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=_SPECIAL.index("<pad>"),
        eos_token_id=_SPECIAL.index("<eos>"),
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn: Qwen3ForCausalLM = Qwen3ForCausalLM(config).train()
    return drawn
