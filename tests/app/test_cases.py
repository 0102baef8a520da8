"""Faults that users of other services of this kind reported, by number, and the tests that prove them absent here."""

import ast
from pathlib import Path

import pytest
from app_fakes import MAX_TOKENS, embed, error_of
from starlette.testclient import TestClient

TESTS = Path(__file__).resolve().parents[1]
CASES = {
    # A short and a long text in one request: no NaN, each as alone (transformers #45491, vllm #16815).
    18: ["app/test_model.py::test_a_batch_equals_each_alone", "app/test_model.py::test_padding_changes_nothing"],
    # Too long: both lengths, or cut and said (text-embeddings-inference #557).
    19: ["app/test_embeddings.py::test_too_long_is_refused_with_both_lengths"],
    # `truncate` holds inside a list (text-embeddings-inference #52).
    20: ["app/test_embeddings.py::test_truncate_holds_for_every_item_and_says_so"],
    # Texts that differ after the last position only (elasticsearch #155516).
    21: ["app/test_cases.py::test_texts_that_differ_only_after_the_last_position"],
    # Health is public while keys are required (text-embeddings-inference #427).
    22: ["app/test_health.py::test_keys"],
    # A forward pass raises: its request only, and readiness tells the truth (infinity #668).
    23: [
        "app/test_errors.py::test_a_forward_pass_that_raises_harms_nobody_else",
        "app/test_health.py::test_readiness_tells_the_truth_after_a_failure",
    ],
    # 2000 requests of random lengths: memory levels off (pytorch #27971).
    24: ["app/test_growth.py::test_memory_levels_off"],
    # One bad item in a shared batch (LitServe #340).
    25: ["app/test_batching.py::test_one_bad_item_fails_only_its_own_request"],
    # 64 calls at once: threads stay bounded (fastapi #603).
    26: ["app/test_growth.py::test_threads_stay_bounded"],
    # A chunked body of 50 MB (starlette #2155).
    27: ["app/test_errors.py::test_fifty_chunked_megabytes_over_a_socket"],
    # Two workers, and figures that are scraped twice (litellm #10595).
    28: [
        "app/test_health.py::test_every_setting_is_a_flag_and_two_workers_are_refused",
        "app/test_metrics.py::test_scraping_twice_changes_no_model_figure",
    ],
    # Blank texts, emoji, joiners, ten scripts (sglang #4988).
    29: ["app/test_errors.py::test_unicode_that_is_text", "app/test_model.py::test_blank_long_and_foreign_texts"],
    # A lone surrogate (jawanndenn #44).
    30: ["app/test_errors.py::test_what_is_not_a_request"],
    # Three sentences for 64 clusters (faiss #414).
    31: ["test_cli.py::test_three_sentences_are_too_little_for_64_clusters"],
    # Lengths one after the other: nothing is compiled again (nano-vllm #105).
    32: ["app/test_growth.py::test_no_length_compiles_a_kernel"],
    # SIGTERM during a request.
    33: ["app/test_health.py::test_sigterm_finishes_what_runs_and_exits_with_0"],
    # Reloads under load, to broken artifacts and good ones.
    34: [
        "app/test_reload.py::test_a_bad_artifact_is_refused_and_the_old_one_serves_on",
        "app/test_reload.py::test_under_load_every_answer_is_from_one_artifact_and_says_which",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: int) -> None:
    for name in CASES[case]:
        path, test = name.split("::")
        tree = ast.parse((TESTS / path).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_texts_that_differ_only_after_the_last_position(client: TestClient) -> None:
    one, other = (" ".join(["word"] * MAX_TOKENS) + end for end in (" left", " right"))
    for text in (one, other):
        error_of(embed(client, text), 422, "input_too_long")
        assert embed(client, text, truncate=True).json()["sparsefinder"]["truncated"] == [True]
