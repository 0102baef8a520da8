"""Fixtures of the service's tests: a service with a fake model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from app_fakes import FakeLoader, make_settings, serving
from starlette.testclient import TestClient


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def client(tmp_path: Path, loader: FakeLoader) -> Iterator[TestClient]:
    with serving(make_settings(tmp_path), loader) as client:
        yield client
