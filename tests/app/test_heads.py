"""Heads of other models than this project ships, taken off them: the same logits, or a refusal."""

from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers import BertForMaskedLM, OPTConfig, OPTForCausalLM

from app.heads import head_of, logprob_rows
from sparsefinder.errors import IncompatibleModelError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


@pytest.mark.parametrize(
    ("family", "kind", "more"),
    [
        ("Bert", "MaskedLM", {}),
        ("Roberta", "MaskedLM", {}),
        ("Electra", "MaskedLM", {"embedding_size": 16}),
        ("ModernBert", "MaskedLM", {}),
        ("Llama", "CausalLM", {"num_key_value_heads": 2}),
        ("Gemma2", "CausalLM", {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.1}),
        ("Granite", "CausalLM", {"num_key_value_heads": 2, "logits_scaling": 3.0}),
    ],
)
def test_a_head_by_itself_gives_the_logits_of_its_model(family: str, kind: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    whole = getattr(transformers, f"{family}For{kind}")(config).eval()
    tokens = torch.randint(3, 61, (1, 20))
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits[0]
        hidden = whole.base_model(input_ids=tokens).last_hidden_state[0]
        rows = [7, 3, 11]
        torch.testing.assert_close(head_of(whole)(hidden[rows]), expected[rows], rtol=1e-4, atol=1e-5)
        parts = list(logprob_rows(head_of(whole), hidden))
    torch.testing.assert_close(torch.cat(parts).exp().sum(-1), torch.ones(20))
    assert whole.base_model is not whole


def test_a_head_that_needs_more_than_hidden_states_is_refused() -> None:
    class Shifted(BertForMaskedLM):
        def forward(self, input_ids: Any = None, **rest: Any) -> Any:
            output = super().forward(input_ids=input_ids, **rest)
            output.logits = output.logits + (0.0 if input_ids is None else 1.0)
            return output

    with pytest.raises(IncompatibleModelError, match="Shifted: expected its head to give the logits"):
        head_of(Shifted(tiny.bert_config()).eval())
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64}
    config = OPTConfig(**sizes, max_position_embeddings=64, word_embed_proj_dim=32)
    with pytest.raises(IncompatibleModelError, match="OPTForCausalLM: expected a head over the last hidden states"):
        head_of(OPTForCausalLM(config).eval())
