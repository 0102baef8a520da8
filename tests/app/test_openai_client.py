"""The official client, unchanged, against a real server on a real socket."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from app_fakes import MAX_TOKENS, FakeLoader, FakeModel, make_settings, on_a_socket

WORDS = ["one two", "three"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = make_settings(tmp_path_factory.mktemp("openai"), api_keys="right-key")
    with on_a_socket(settings) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="right-key", max_retries=0, timeout=20) as client:
        yield client


def expected(model_id: str) -> list[list[float]]:
    loader = FakeLoader()
    model = FakeModel(loader, Path(model_id), {"version": "v1", "bias": 0.0, "fault": None})
    return [model.vector(ids, "sparse").tolist() for ids in model.tokenize(WORDS)]


def test_embeddings(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="first", input=WORDS, encoding_format="float")
    coded = client.embeddings.create(model="first", input=WORDS)  # the client asks for base64 and decodes it itself
    for answer in (plain, coded):
        np.testing.assert_allclose([item.embedding for item in answer.data], expected("first"), rtol=1e-6)
        assert [item.index for item in answer.data] == [0, 1]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (7, 7, "first")
    assert plain.to_dict()["sparsefinder"]["attention"] == "sparse"  # type: ignore[index]


def test_our_fields_go_through_extra_body(client: openai.OpenAI) -> None:
    raw = client.embeddings.with_raw_response.create(model="first", input="a", extra_body={"attention": "dense"})
    assert raw.headers["x-sparsefinder-attention"] == "dense"
    answer = client.embeddings.create(model="first", input="w " * 100, extra_body={"truncate": True})
    assert answer.usage.prompt_tokens == MAX_TOKENS


def test_token_ids(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="first", input=[[5, 6], [7]]).usage.prompt_tokens == 3


def test_errors_become_the_clients_own(client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.embeddings.create(model="first", input="w " * 100)
    assert refused.value.code == "input_too_long"
    assert refused.value.param == "input"
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")
    with pytest.raises(openai.InternalServerError):
        client.embeddings.create(model="first", input="nan")
    with (
        openai.OpenAI(base_url=address, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.embeddings.create(model="first", input="a")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["first"]
