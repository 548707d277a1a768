"""The blockwise training attention gives what torch's own gives, gradients too, and never looks ahead."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.train import layers as attention


@pytest.mark.parametrize("length", [1, 5, 128, 300])
def test_output_and_gradients(length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (6, 2, 2))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out, _ = attention.block_attention(None, q, k, v, None)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    got = torch.autograd.grad(out.transpose(1, 2), (q, k, v), upstream)
    torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_a_model_computes_the_same_with_it():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 50, (3, 200))
    expected = model(ids).logits
    model.set_attn_implementation(attention.register())
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
