"""The training loop in process: what is trained on, what is logged, and that a stop leaves no trace."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config, small_decoder
from mill import Mill, finished
from torch import Tensor
from trainers import SETTINGS, make_trainer, own_settings_of_torch  # noqa: F401 (a fixture)

from drafter.codecs import round_trip
from drafter.engine import Engine, Generation
from drafter.replay import Conversation, replay_offline, summary
from stages.errors import UserError
from stages.files import read_jsonl
from stages.qat import make_plan, straight_through
from stages.training import trainer as training
from stages.training.batches import Schedule, trainable
from stages.training.loss import learning_rate
from stages.training.shards import Row, write_shard
from stages.training.trainer import Trainer

VOCABULARY = small_config().vocab_size


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Eight rows of a target's greedy text: of batches of two, four make an epoch."""
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (6 + size,), generator=random).tolist() for size in range(8)]
    engine = Engine(small_decoder(seed=1), context_tokens=64)
    generated = engine.generate(prompts, Generation(max_tokens=12, top_k=4))
    return [
        Row(torch.tensor(prompt), torch.tensor(one.tokens), torch.tensor(one.topk_ids),
            torch.tensor(one.topk_logprobs))
        for prompt, one in zip(prompts, generated, strict=True)
    ]


@pytest.fixture(scope="module")
def dev(rows: list[Row]) -> list[Conversation]:
    return [Conversation(f"c{index}", "math", tuple(row.prompt.tolist()), tuple(row.continuation.tolist()))
            for index, row in enumerate(rows[:3])]


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a training run ends in."""
    masters = {f"master/{name}": master for name, master in trainer.finished().items()}
    states = trainer.optimiser.state
    moments = {f"{kind}/{name}": states[master][kind] for name, master in trainer.masters.items()
               for kind in ("exp_avg", "exp_avg_sq", "step")}
    return masters | moments | trainer.sensitivities()


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


class Stopping(Trainer):
    """Trains a number of steps, and no further."""

    left = 0

    def _train_step(self, batch) -> None:
        if not self.left:
            raise Stopped
        self.left -= 1
        super()._train_step(batch)


@pytest.fixture(scope="module")
def undisturbed(rows: list[Row], dev: list[Conversation], tmp_path_factory) -> tuple[Trainer, dict]:
    trainer = make_trainer(tmp_path_factory.mktemp("undisturbed"))
    return trainer, trainer.train(rows, dev)


@pytest.mark.parametrize("moments", [[stop] for stop in range(8)] + [[2, 3, 1, 4]])
def test_a_stop_at_any_step_leaves_no_trace(
        rows: list[Row], dev: list[Conversation], undisturbed, tmp_path: Path, moments: list[int]) -> None:
    for left in moments:
        stopping = make_trainer(tmp_path, kind=Stopping)
        stopping.left = left
        with pytest.raises(Stopped):
            stopping.train(rows, dev)
    resumed = make_trainer(tmp_path)
    assert resumed.train(rows, dev) == undisturbed[1]
    _same(resumed, undisturbed[0])


@pytest.mark.parametrize("whole", [False, True])
def test_a_stop_while_a_checkpoint_is_written_leaves_no_trace(
        rows: list[Row], dev: list[Conversation], undisturbed, tmp_path: Path, whole: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    save_file = training.save_file

    def stop_in_second(tensors, path, metadata) -> None:
        save_file(tensors, path, metadata=metadata)
        if metadata["step"] == "6":
            if not whole:
                path.write_bytes(path.read_bytes()[:-7])
            raise Stopped

    monkeypatch.setattr(training, "save_file", stop_in_second)
    with pytest.raises(Stopped):
        make_trainer(tmp_path).train(rows, dev)
    monkeypatch.undo()
    assert len(list((tmp_path / "work").glob("*.partial"))) == 1
    resumed = make_trainer(tmp_path)
    assert resumed.train(rows, dev) == undisturbed[1]
    assert "resumes at step 3" in (tmp_path / "distill.log").read_text()
    _same(resumed, undisturbed[0])


def _same(found: Trainer, expected: Trainer) -> None:
    assert found.lines == expected.lines
    pairs = tensors_of(found), tensors_of(expected)
    assert pairs[0].keys() == pairs[1].keys()
    assert [name for name in pairs[0] if not torch.equal(pairs[0][name], pairs[1][name])] == []


def test_repeated_rows_are_learnt_in_thirty_steps(
        rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 30, "batch_rows": 8})
    trainer = make_trainer(tmp_path, settings)
    metrics = trainer.train(rows, dev)
    losses = [line["loss"] for line in trainer.lines if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert metrics["tau_dev_before"] < 1.5 < 4 < metrics["tau_dev"]["tau"]


def test_simulated_tau_is_what_the_engine_replays(
        rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 6, "batch_rows": 8})
    trainer = make_trainer(tmp_path, settings)
    simulated = trainer.train(rows, dev)["tau_dev"]
    decoder = small_decoder(seed=2)
    decoder.load_state_dict(trainer.finished(), strict=False)
    engine = Engine(decoder, context_tokens=64, slots=1)
    steps = [replay_offline(one, lambda context: engine.draft([list(context)])[0]) for one in dev]
    assert 1 < simulated["tau"] < 8
    assert summary(dev, steps).to_json() == simulated


def test_rows_without_a_target_are_left_out_and_counted(
        rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    long = [dataclasses.replace(row, prompt=torch.ones(size, dtype=torch.long))
            for size, row in zip((41, 60, 500), rows, strict=False)]
    trainer = make_trainer(tmp_path)
    metrics = trainer.train([rows[0], *long], dev)
    assert (metrics["rows"], metrics["rows_dropped"]) == (1, 3)
    assert metrics["target_tokens"] == len(rows[0].continuation)
    assert metrics["positions_trained"] == 8 * len(rows[0].continuation)
    assert all(line["loss"] > 0 for line in trainer.lines if "loss" in line)  # neither NaN nor a proud 0
    assert "3 rows without a token to predict" in (tmp_path / "distill.log").read_text()


def test_a_set_without_targets_stops_before_the_first_step(
        rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    long = [dataclasses.replace(row, prompt=torch.ones(41, dtype=torch.long)) for row in rows]
    trainer = make_trainer(tmp_path)
    with pytest.raises(UserError, match="none of 8 rows has a continuation token within max_row_tokens = 40"):
        trainer.train(long, dev)
    assert trainer.lines == []
    assert not list((tmp_path / "work").iterdir())


def test_a_row_is_cut_where_its_last_token_still_has_a_predictor(rows: list[Row]) -> None:
    row = dataclasses.replace(rows[0], prompt=torch.ones(38, dtype=torch.long))
    (kept,), dropped = trainable([row], 40)
    assert dropped == 0
    assert len(kept.prompt) + len(kept.continuation) - 1 == 40
    assert len(kept.continuation) == len(kept.topk_ids) == len(kept.topk_logprobs) == 3


@pytest.mark.parametrize(("count", "batch"), [(8, 2), (7, 3), (100, 3), (1, 4)])
def test_every_row_comes_once_an_epoch_in_another_order_each_time(count: int, batch: int) -> None:
    steps = -(-count // batch)
    schedule = Schedule(list(range(count)), batch, seed=0)
    epochs = [[row for step in range(steps) for row in schedule.rows(epoch * steps + step)]
              for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count < 7 or len({tuple(epoch) for epoch in epochs}) == 3
    assert Schedule(list(range(count)), batch, seed=0).rows(2 * steps) == schedule.rows(2 * steps)


def test_the_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 20, 5, 1.0) for step in range(21)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[20] == pytest.approx(0)
    assert learning_rate(0, 3, 0, 1.0) == 1.0


def test_rounding_is_exact_forwards_and_unseen_backwards() -> None:
    masters = {name: weight.detach().clone().requires_grad_()
               for name, weight in small_decoder().named_parameters()}
    plan = make_plan(masters, "int4", 32)
    seen = straight_through(masters, plan)
    for name, master in masters.items():
        assert torch.equal(seen[name], round_trip(master.detach(), plan[name]))
        (seen[name] * 3).sum().backward()
        assert torch.equal(master.grad, torch.full_like(master, 3.0))


def test_a_shard_is_the_same_file_however_often_it_is_written(tmp_path: Path) -> None:
    generated = Engine(small_decoder(), 64).generate([[1, 2], [3]], Generation(max_tokens=3, top_k=2))
    written = set()
    for attempt in range(12):  # the order of a hash map would show
        write_shard(tmp_path / str(attempt), [[1, 2], [3]], generated)
        written.add((tmp_path / str(attempt)).read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize(("stage", "steps"), [("distill", 12), ("qat", 9)])
def test_the_log_of_a_stage_tells_every_step_and_no_time(
        tmp_path_factory: pytest.TempPathFactory, stage: str, steps: int) -> None:
    mill: Mill = finished(tmp_path_factory)
    lines = list(read_jsonl(mill.folder(stage) / "training.jsonl"))
    assert [line["step"] for line in lines] == [0, *range(1, steps + 1), steps]
    assert [set(line) for line in (lines[0], lines[-1])] == [{"step", "tau_dev"}] * 2
    assert all(set(line) == {"step", "positions", "rate", "loss", "ce", "kl"} for line in lines[1:-1])
    metrics = mill.metrics(stage)
    assert lines[0]["tau_dev"] == metrics["tau_dev_before"]
    assert lines[-1]["tau_dev"] == round(metrics["tau_dev"]["tau"], 4)
    assert metrics["positions_trained"] == sum(line.get("positions", 0) for line in lines)


def test_a_loss_that_is_not_finite_stops_at_its_step(
        rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    class Broken(Trainer):
        def _backward(self, batch: Any) -> Any:
            result = super()._backward(batch)
            return result._replace(total=result.total * float("nan")) if self.step == 2 else result

    trainer = make_trainer(tmp_path, kind=Broken)
    with pytest.raises(UserError, match=r"step 3: the loss \(nan\)"):
        trainer.train(rows, dev)
    assert trainer.step == 2
