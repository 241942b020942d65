"""The plain decoder is the model that transformers makes of the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_refit.demo.tiny_model import make_tiny_model
from elastic_refit.engines.plain_lm import PlainShape, load_plain_lm, write_plain_checkpoint
from elastic_refit.engines.torch_engine import load_causal_lm


def test_it_gives_the_logits_of_transformers_for_a_checkpoint_of_either_maker(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "theirs", family="llama", seed=3)
    write_plain_checkpoint(tmp_path / "ours", PlainShape(num_hidden_layers=3), seed=3)
    ids = torch.tensor([[5, 200, 17, 99, 300, 1, 1, 42]])
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        plain, reference = load_plain_lm(folder), load_causal_lm(folder)
        assert set(plain.state_dict()) == set(reference.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(plain(ids).logits, reference(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_going_on_from_what_it_remembers_equals_reading_it_whole(tmp_path: Path) -> None:
    write_plain_checkpoint(tmp_path, PlainShape(), seed=1)
    model, ids = load_plain_lm(tmp_path), torch.tensor([[7, 8, 9, 10, 11]])
    with torch.no_grad():
        begun = model(ids[:, :3])
        gone_on = model(ids[:, 3:], past_key_values=begun.past_key_values)
        torch.testing.assert_close(gone_on.logits, model(ids).logits[:, 3:])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_plain_checkpoint(tmp_path / name, PlainShape(num_hidden_layers=1), seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
