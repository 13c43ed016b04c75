"""The training loop in process: what is trained on, what is logged, and that a stop leaves no trace."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config, small_decoder
from mill import Mill, finished
from torch import Tensor
from trainers import SETTINGS, as_rows, make_trainer, own_settings_of_torch  # noqa: F401 (a fixture)

from drafter.engine import Engine, Generation
from drafter.model import Decoder
from drafter.replay import Conversation, replay_offline, summary
from stages.errors import UserError
from stages.files import read_jsonl
from stages.training import checkpoints
from stages.training.batches import Selection
from stages.training.loss import Targets, learning_rate
from stages.training.online import TargetStates
from stages.training.optimiser import state_of
from stages.training.rows import Row, Rows
from stages.training.shards import write_shard
from stages.training.trainer import LOGGED, Trainer

VOCABULARY = small_config().vocab_size


@pytest.fixture(scope="module")
def list_of_rows() -> list[Row]:
    """Eight rows of a target's greedy text: of batches of two, four make an epoch."""
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (6 + size,), generator=random).tolist() for size in range(8)]
    engine = Engine(small_decoder(seed=1), context_tokens=64)
    generated = engine.generate(prompts, Generation(max_tokens=12, top_k=4))
    return [
        Row(torch.tensor(prompt), torch.tensor(one.tokens), one.topk_ids, one.topk_logprobs)
        for prompt, one in zip(prompts, generated, strict=True)
    ]


@pytest.fixture(scope="module")
def rows(list_of_rows: list[Row]) -> Rows:
    return as_rows(list_of_rows)


@pytest.fixture(scope="module")
def dev(list_of_rows: list[Row]) -> list[Conversation]:
    return [Conversation(f"c{index}", "math", tuple(row.prompt.tolist()), tuple(row.continuation.tolist()))
            for index, row in enumerate(list_of_rows[:3])]


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a training run ends in."""
    masters = {f"master/{name}": master for name, master in trainer.finished().items()}
    return masters | state_of(trainer.optimiser, trainer.masters) | trainer.sensitivities()


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


class Stopping(Trainer):
    """Trains a number of steps, and no further."""

    left = 0

    def _train_step(self, batch, targets) -> None:
        if not self.left:
            self.checkpoints.wait()
            raise Stopped
        self.left -= 1
        super()._train_step(batch, targets)


@pytest.fixture(scope="module")
def undisturbed(rows: list[Row], dev: list[Conversation], tmp_path_factory) -> tuple[Trainer, dict]:
    trainer = make_trainer(tmp_path_factory.mktemp("undisturbed"))
    return trainer, trainer.train(rows, dev)


@pytest.mark.parametrize("moments", [[stop] for stop in range(8)] + [[2, 1, 3]])
def test_a_stop_at_any_step_leaves_no_trace(
        rows: Rows, dev: list[Conversation], undisturbed, tmp_path: Path, moments: list[int]) -> None:
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
        rows: Rows, dev: list[Conversation], undisturbed, tmp_path: Path, whole: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    save_file = checkpoints.save_file

    def stop_in_second(tensors, path, metadata) -> None:
        save_file(tensors, path, metadata=metadata)
        if int(metadata["step"]) >= 4:
            if not whole:
                path.write_bytes(path.read_bytes()[:-7])
            raise Stopped

    monkeypatch.setattr(checkpoints, "save_file", stop_in_second)
    with pytest.raises(Stopped):
        make_trainer(tmp_path).train(rows, dev)
    monkeypatch.undo()
    assert len(list((tmp_path / "work").glob("*.partial"))) == 1
    resumed = make_trainer(tmp_path)
    assert resumed.train(rows, dev) == undisturbed[1]
    assert "resumes at step" in (tmp_path / "distill.log").read_text()
    _same(resumed, undisturbed[0])


def _same(found: Trainer, expected: Trainer) -> None:
    assert found.lines == expected.lines
    pairs = tensors_of(found), tensors_of(expected)
    assert pairs[0].keys() == pairs[1].keys()
    assert [name for name in pairs[0] if not torch.equal(pairs[0][name], pairs[1][name])] == []


def test_repeated_rows_are_learnt_in_thirty_steps(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 30, "batch_tokens": 400})
    trainer = make_trainer(tmp_path, settings)
    metrics = trainer.train(rows, dev)
    losses = [line["loss"] for line in trainer.lines if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert metrics["tau_dev_before"] < 1.5 < 4 < metrics["tau_dev"]["tau"]


def test_simulated_tau_is_what_the_engine_replays(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 6, "batch_tokens": 400})
    trainer = make_trainer(tmp_path, settings)
    simulated = trainer.train(rows, dev)["tau_dev"]
    decoder = small_decoder(seed=2)
    decoder.load_state_dict(trainer.finished(), strict=False)
    engine = Engine(decoder, context_tokens=64, slots=1)
    steps = [replay_offline(one, lambda context: engine.draft([list(context)])[0]) for one in dev]
    assert 1 < simulated["tau"] < 8
    assert summary(dev, steps).to_json() == simulated


def test_rows_without_a_target_are_left_out_and_counted(
        list_of_rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    long = [dataclasses.replace(row, prompt=torch.ones(size, dtype=torch.long))
            for size, row in zip((41, 60, 500), list_of_rows, strict=False)]
    trainer, first = make_trainer(tmp_path), list_of_rows[0]
    metrics = trainer.train(as_rows([first, *long]), dev)
    assert (metrics["rows"], metrics["rows_dropped"]) == (1, 3)
    assert metrics["target_tokens"] == len(first.continuation)
    assert metrics["positions_trained"] == 8 * len(first.continuation)
    assert all(line["loss"] > 0 for line in trainer.lines if "loss" in line)  # neither NaN nor a proud 0
    assert "3 rows without a token to predict" in (tmp_path / "distill.log").read_text()


def test_a_set_without_targets_stops_before_the_first_step(
        list_of_rows: list[Row], dev: list[Conversation], tmp_path: Path) -> None:
    long = [dataclasses.replace(row, prompt=torch.ones(41, dtype=torch.long)) for row in list_of_rows]
    trainer = make_trainer(tmp_path)
    with pytest.raises(UserError, match="none of 8 rows has a continuation token within max_row_tokens = 40"):
        trainer.train(as_rows(long), dev)
    assert trainer.lines == []
    assert not list((tmp_path / "work").iterdir())


def test_the_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 20, 5, 1.0) for step in range(21)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[20] == pytest.approx(0)
    assert learning_rate(0, 3, 0, 1.0) == 1.0


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
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    class Broken(Trainer):
        def _backward(self, batch: Any, targets: Any) -> Any:
            result = super()._backward(batch, targets)
            return result._replace(total=result.total * float("nan")) if self.step == 2 else result

    trainer = make_trainer(tmp_path, kind=Broken)
    with pytest.raises(UserError, match=r"step 3: the loss \(nan\)"):
        trainer.train(rows, dev)
    trainer.checkpoints.wait()
    assert not list((tmp_path / "work").glob("checkpoint-00000003*"))  # what is not finite is never saved


@pytest.mark.parametrize("options", [
    {"ema_decay": 0.6}, {"optimiser": "bitsandbytes"}, {"train_embedding": False},
    {"activation_checkpointing": True, "evaluations": 4},
])  # fmt: skip
def test_every_option_resumes_without_a_trace(
        rows: Rows, dev: list[Conversation], tmp_path: Path, options: dict[str, Any]) -> None:
    chosen = SETTINGS.model_copy(update=options)
    peace = make_trainer(tmp_path / "peace", chosen)
    metrics = peace.train(rows, dev)
    stopping = make_trainer(tmp_path / "stopped", chosen, kind=Stopping)
    stopping.left = 5
    with pytest.raises(Stopped):
        stopping.train(rows, dev)
    resumed = make_trainer(tmp_path / "stopped", chosen)
    assert resumed.train(rows, dev) == metrics
    _same(resumed, peace)


def test_the_average_of_the_weights_is_what_is_finished(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    class Watching(Trainer):
        seen: list[Tensor]

        def _train_step(self, batch: Any, targets: Any) -> None:
            super()._train_step(batch, targets)
            self.seen.append(self.masters["model.norm.weight"].detach().clone())

    trainer = make_trainer(tmp_path, SETTINGS.model_copy(update={"ema_decay": 0.6}), kind=Watching)
    trainer.seen = [trainer.masters["model.norm.weight"].detach().clone()]
    trainer.train(rows, dev)
    average = trainer.seen[0]
    for seen in trainer.seen[1:]:
        average = 0.6 * average + 0.4 * seen
    torch.testing.assert_close(trainer.finished()["model.norm.weight"], average)
    assert not torch.equal(average, trainer.seen[-1])


def test_sensitivities_are_mean_squared_gradients_of_every_matrix(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    class Watching(Trainer):
        def _backward(self, batch: Any, targets: Any) -> Any:
            result = super()._backward(batch, targets)
            gradients.append({name: one.grad.clone() for name, one in self.masters.items()})
            return result

    gradients: list[dict[str, Tensor]] = []
    trainer = make_trainer(tmp_path, kind=Watching)
    trainer.train(rows, dev)
    found = trainer.sensitivities()
    assert found.keys() == {name for name, one in trainer.masters.items() if one.ndim == 2}
    for name, means in found.items():
        expected = torch.stack([one[name].square().mean(1) for one in gradients[4:]]).mean(0)
        torch.testing.assert_close(means, expected)
        assert bool((means > 0).any())


def test_a_frozen_embedding_is_measured_and_not_moved(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SETTINGS.model_copy(update={"train_embedding": False}))
    before = trainer.frozen["model.embed_tokens.weight"].clone()
    trainer.train(rows, dev)
    assert torch.equal(trainer.finished()["model.embed_tokens.weight"], before)
    assert bool((trainer.sensitivities()["model.embed_tokens.weight"] > 0).all())  # the head sees every row


def test_dev_is_looked_at_as_often_as_asked(rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SETTINGS.model_copy(update={"evaluations": 4}))
    trainer.train(rows, dev)
    assert [line["step"] for line in trainer.lines if "tau_dev" in line] == [0, 2, 4, 6, 8]


def test_the_targets_whole_distribution_comes_from_its_hidden_states(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    target = small_decoder(seed=1)
    chosen = {"kl": "whole", "steps": 30, "batch_tokens": 400, "ce_share": 0.0}
    trainer = make_trainer(tmp_path, SETTINGS.model_copy(update=chosen))
    states = TargetStates(target, "cpu")
    metrics = trainer.train(rows, dev, states)
    # Learnt from the distribution alone.
    assert metrics["tau_dev_before"] < 1.5 < 3 < metrics["tau_dev"]["tau"]
    kept = Selection(rows, 40)
    known = Targets(*(torch.cat([getattr(kept[row], name) for row in (5, 2)])
                      for name in ("continuation", "topk_ids", "topk_logprobs")))
    joined = states.join(known, [5, 2])
    logits_nv = joined.hidden_nh @ joined.head_vh.T
    assert torch.equal(logits_nv.argmax(-1), known.tokens_n)
    torch.testing.assert_close(logits_nv.log_softmax(-1).gather(1, known.ids_nk.long()), known.logprobs_nk,
                               atol=1e-4, rtol=1e-4)


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(
        rows: Rows, dev: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_names: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device\); make room"):
        make_trainer(tmp_path).train(rows, dev)


def test_a_checkpoint_is_due_after_its_time_and_never_while_one_is_written(tmp_path: Path) -> None:
    late = checkpoints.Checkpoints(tmp_path, every_s=1000)
    assert not late.due()
    late.last -= 1001
    assert late.due()
    busy = checkpoints.Checkpoints(tmp_path, every_s=0)
    held = threading.Event()
    busy.writing = busy.pool.submit(held.wait)
    assert not busy.due()
    held.set()
    busy.wait()
    assert busy.due()


def test_no_steps_measure_the_start_and_leave_it(rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SETTINGS.model_copy(update={"steps": 0, "train_embedding": False}))
    start = {name: one.detach().clone() for name, one in trainer.finished().items()}
    metrics = trainer.train(rows, dev)
    assert metrics["tau_dev"]["tau"] == pytest.approx(metrics["tau_dev_before"], abs=1e-4)
    assert all(torch.equal(one, start[name]) for name, one in trainer.finished().items())
    felt = trainer.sensitivities()
    assert felt.keys() == {name for name, one in start.items() if one.ndim == 2}
    assert all(bool((means > 0).any()) for means in felt.values())


def test_measuring_is_done_once_however_often_it_is_begun(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    chosen = SETTINGS.model_copy(update={"steps": 0})
    first = make_trainer(tmp_path, chosen)
    first.train(rows, dev)  # and killed before its outputs were recorded
    again = make_trainer(tmp_path, chosen)
    again.train(rows, dev)
    felt = first.sensitivities(), again.sensitivities()
    assert all(torch.equal(felt[0][name], felt[1][name]) for name in felt[0])


def test_another_vocabulary_has_no_whole_distribution_to_compare(
        rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    config = dataclasses.replace(small_config(), vocab_size=VOCABULARY + 32)
    target = TargetStates(Decoder(config).requires_grad_(False), "cpu")
    with pytest.raises(UserError, match=f"the target has {VOCABULARY + 32} ids, the drafter {VOCABULARY}"):
        make_trainer(tmp_path, SETTINGS.model_copy(update={"kl": "whole"})).train(rows, dev, target)


def test_the_log_that_ships_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    steps = 10 * LOGGED
    trainer = make_trainer(tmp_path, SETTINGS.model_copy(update={"steps": steps}))
    plain: dict[str, float] = {"positions": 3, "rate": 0.1, "loss": 1.0, "ce": 1.0, "kl": 1.0}
    trainer.lines = [{"step": 0, "tau_dev": 1.0}, {"step": 1, "bits_per_weight": 3.0} | plain,
                     *({"step": step} | plain for step in range(2, steps + 1)),
                     {"step": steps, "tau_dev": 2.0}]  # fmt: skip
    log = trainer.log()
    assert len(log) == LOGGED + 3
    assert [line for line in log if "tau_dev" in line or "bits_per_weight" in line] == [
        trainer.lines[0], trainer.lines[1], trainer.lines[-1]]
