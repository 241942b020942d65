"""The engine suite on every engine that has its weights in the test's process, and on the torch engine of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from elastic_refit.demo.tiny_model import Family
from elastic_refit.engines.base import Hosting
from tests.engine_lab import INLINE, Lab
from tests.engine_suite import *  # noqa: F403 - every test of the suite is one of this module
from tests.engine_suite import close_and_be_refused


@dataclass(frozen=True)
class Case:
    """One engine and one model."""

    kind: str
    family: Family = "qwen2"
    is_tied: bool = False
    hosting: Hosting = INLINE

    def __str__(self) -> str:
        wide = f"-{self.hosting.width}-ranks" if self.hosting.width > 1 else ""
        return f"{self.kind}{wide}-{self.family}{'-tied' if self.is_tied else ''}"


TWO_RANKS = Hosting(width=2)
CASES = [
    *(Case("torch"), Case("torch", is_tied=True), Case("torch", hosting=TWO_RANKS)),
    *(Case("vllm"), Case("vllm", is_tied=True), Case("vllm", "llama")),
]
PARAMS = [pytest.param(case, id=str(case), marks=[pytest.mark.vllm] if case.kind == "vllm" else []) for case in CASES]
# vLLM and what it imports use what they themselves deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=PARAMS)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One engine for all tests of a case, in their order."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp("model")
    lab = Lab(folder, case.kind, case.family, tie_embeddings=case.is_tied, hosting=case.hosting)
    yield lab
    lab.engine.close()
    if lab.fleet is not None:
        lab.fleet.close()


def test_a_closed_engine_refuses_whoever_waits_and_whoever_comes(lab: Lab) -> None:
    close_and_be_refused(lab)
