"""The diffusion schedule is the published one; the model uses its condition; generation matches training."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.tractodiff import task as module
from runner.tasks.tractodiff.diffusion import Schedule
from runner.tasks.tractodiff.fields import CONDITION_SIZE, Fields
from runner.tasks.tractodiff.generation import generate_streamlines
from runner.tasks.tractodiff.lines import connects, ends_of, length, mdf, trk, unit_steps, voxels
from runner.tasks.tractodiff.model import Shape, StreamlineDiffusion
from runner.tasks.tractodiff.task import SHAPES, TractoDiff, build
from runner.tasks.tractodiff.tracking import Tracking
from torch import Tensor

from runner.base.errors import ConfigError
from runner.base.task import Context, Prediction
from tests.rounding import allowed, assert_close
from tests.tasks.few_streamlines import few_streamlines

pytest.importorskip("dipy")
nibabel = pytest.importorskip("nibabel")

SMALL = Shape((32, 16), time=8, hidden=16, head=(8,), channels=(8, 16, 16), num_steps=10)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with few_streamlines():
        yield tmp_path_factory.mktemp("cache")


@pytest.fixture
def task(cache: Path, monkeypatch: pytest.MonkeyPatch) -> TractoDiff:
    return make_task(cache, monkeypatch)


def make_task(cache: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> TractoDiff:
    monkeypatch.setitem(module.SHAPES, "tiny", SMALL)  # type: ignore[arg-type]  # a dict
    torch.manual_seed(0)
    made = build(Context(0, None, cache), **options)
    assert isinstance(made, TractoDiff)
    return made


def inputs(count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(count, 16, 3, generator=generator)
    return (
        noisy,
        torch.randint(10, (count,), generator=generator),
        torch.randn(count, CONDITION_SIZE, generator=generator),
    )


# The schedule


@pytest.mark.parametrize("num_steps", [10, 50, 200, 1000])
def test_the_noise_level_grows_from_0_to_1(num_steps: int) -> None:
    signal = Schedule(num_steps).signal
    assert signal.shape == (num_steps,)
    assert (signal.diff() < 0).all()
    assert 0.97 < signal[0] < 1
    assert 0 <= signal[-1] < 1e-4  # lint-tests: tolerance: the remaining signal, not rounding
    assert signal[num_steps // 2 - 1] == pytest.approx(0.5, abs=0.02)  # squared cosine


def test_adding_noise_preserves_the_variance() -> None:
    schedule, generator = Schedule(50), torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 4000, 16, 3, generator=generator)
    for step in (0, 10, 25, 49):
        assert schedule.add_noise(x0, torch.full((4000,), step), noise).var() == pytest.approx(1, abs=0.02)


def test_a_reverse_step_has_the_moments_of_the_previous_step() -> None:
    """For a known x0, a reverse step from x_t has exactly the mean and variance of x_{t-1}."""
    schedule = Schedule(50)
    signal = schedule.signal.double()
    for step in (1, 20, 48):
        mean = schedule.x0_weight[step] + schedule.xt_weight[step] * signal[step].sqrt()
        variance = schedule.xt_weight[step] ** 2 * (1 - signal[step]) + schedule.deviation[step] ** 2
        assert float(mean) == pytest.approx(float(signal[step - 1].sqrt()), abs=allowed(torch.float32, 50, growth=2))
        assert float(variance) == pytest.approx(float(1 - signal[step - 1]), abs=allowed(torch.float32, 50, growth=2))


def test_sampling_with_an_oracle_recovers_the_data() -> None:
    x0 = torch.randn(5, 16, 3, generator=torch.Generator().manual_seed(0))
    result = Schedule(50).sample(lambda *_: x0, lambda: torch.randn(5, 16, 3))
    assert_close(result, x0, terms=50)


def test_sampling_starts_from_pure_noise_and_visits_all_steps() -> None:
    seen = []

    def predict(noisy: Tensor, step: Tensor) -> Tensor:
        seen.append(step.tolist())
        return torch.zeros_like(noisy)

    Schedule(10).sample(predict, lambda: torch.zeros(2, 16, 3))
    assert seen == [[step, step] for step in range(9, -1, -1)]


def test_ddim_takes_the_requested_number_of_steps() -> None:
    seen, x0 = [], torch.randn(5, 16, 3, generator=torch.Generator().manual_seed(0))
    draws = iter([torch.randn(5, 16, 3, generator=torch.Generator().manual_seed(1))])

    def predict(noisy: Tensor, step: Tensor) -> Tensor:
        seen.append(int(step[0]))
        return x0

    torch.testing.assert_close(Schedule(50).sample(predict, lambda: next(draws), 4), x0)
    assert seen == [49, 33, 16, 0]
    assert seen == sorted(set(seen), reverse=True)


def test_a_step_of_ddim_keeps_the_noise() -> None:
    """If x0 is predicted exactly, x at each step is x0 plus the same noise, scaled for that step."""
    schedule, generator = Schedule(50), torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 5, 16, 3, generator=generator)
    start = schedule.add_noise(x0, torch.full((5,), 49), noise)

    def predict(noisy: Tensor, step: Tensor) -> Tensor:
        assert_close(noisy, schedule.add_noise(x0, step, noise), terms=50)
        return x0

    schedule.sample(predict, lambda: start, 10)


# The model


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("denoiser", ["gru", "unet"])
def test_every_parameter_gets_a_gradient(denoiser: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(cache, monkeypatch, denoiser=denoiser)
    task.loss(task.model, task.train.spread(64))[0].backward()
    for name, weight in task.model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("denoiser", ["gru", "unet"])
def test_the_output_depends_on_every_input(denoiser: Any) -> None:
    torch.manual_seed(0)
    model = StreamlineDiffusion(SMALL, 10, denoiser).eval()
    noisy, step, condition = inputs()
    out = model(noisy, step, condition)
    assert out.shape == (4, 16, 3)
    for other in (
        model(noisy, step, condition + torch.nn.functional.one_hot(torch.tensor(340), CONDITION_SIZE)),
        model(noisy, (step + 5) % 10, condition),
        model(noisy + torch.nn.functional.one_hot(torch.tensor(0), 3), step, condition),
    ):
        assert ((out - other).abs().amax(dim=(1, 2)) > 1e-4).all()


@pytest.mark.parametrize("denoiser", ["gru", "unet"])
def test_composed_layers_equal_the_model(denoiser: Any) -> None:
    torch.manual_seed(0)
    model = StreamlineDiffusion(SMALL, 10, denoiser).eval()
    model.center.normal_()
    given = inputs()
    whole = model(*given)
    first, *rest = model.layers()
    value = first(*given)
    for layer in rest:
        value = layer(value)
    assert torch.equal(value, whole)
    held = {weight for layer in model.layers() for weight in layer.parameters()}
    assert held == set(model.parameters())


@pytest.mark.parametrize(("denoiser", "millions"), [("gru", 5.565), ("unet", 258.049)])
def test_the_full_size_is_the_published_one(denoiser: Any, millions: float) -> None:
    with torch.device("meta"):
        model = StreamlineDiffusion(SHAPES["full"], 200, denoiser)
    widths = [layer.out_features for layer in model.encoder if isinstance(layer, torch.nn.Linear)]
    assert widths == [1024, 2048, 512, 512]
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", ["gru", "unet"])
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # a warning of torch about the GRU
def test_the_model_is_traced_with_the_example(denoiser: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(cache, monkeypatch, denoiser=denoiser)
    example, model = task.example(), task.model.eval()
    assert [tuple(each.shape) for each in example] == [(2, 16, 3), (2,), (2, CONDITION_SIZE)]
    assert all(torch.equal(one, other) for one, other in zip(example, task.example(), strict=True))
    traced = torch.export.export(model, example).module()
    torch.testing.assert_close(traced(*example), model(*example))


# The loss


@pytest.mark.slow
def test_the_loss_is_a_sum_over_pieces(task: TractoDiff) -> None:
    batch = task.train.spread(7)
    loss, items = task.loss(task.model, batch)
    assert items == 7
    torch.manual_seed(1)
    losses = torch.stack([task.loss(task.model, task.train.spread(256))[0] for _ in range(20)]).detach() / 256
    torch.manual_seed(1)
    smaller = torch.stack([task.loss(task.model, task.train.spread(64))[0] for _ in range(80)]).detach() / 64
    assert float(losses.mean()) == pytest.approx(float(smaller.mean()), rel=0.05)
    assert loss.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", ["gru", "unet"])
def test_the_loss_is_float32_under_autocast(denoiser: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(cache, monkeypatch, denoiser=denoiser)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = task.loss(task.model, task.train.spread(8))
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)


class Straight(torch.nn.Module):
    """Predicts the same line for every piece."""

    def __init__(self, line: Tensor) -> None:
        super().__init__()
        self.line = torch.nn.Parameter(line)

    def forward(self, noisy: Tensor, step: Tensor, condition: Tensor) -> Tensor:
        return self.line.expand(len(noisy), -1, -1)


def test_leaving_the_mask_is_penalized(task: TractoDiff) -> None:
    batch = task.dataset("val").spread(32)
    x0 = batch["points"] / task.model.scale
    model = Straight(torch.zeros(1, 16, 3))
    distance = 20 * float(mdf(torch.zeros_like(x0), x0).sum())
    loss, _ = task.loss(model, batch)
    assert float(loss.detach()) == pytest.approx(distance, rel=0.02)  # points that stay at the start are inside
    # far outside, a point costs 10 times the mask value of its real point, so 10 for a piece that is entirely inside
    away = Straight(torch.full((1, 16, 3), 100.0))
    loss, items = task.loss(away, batch)
    half = {name: part[::2] for name, part in batch.items()}
    expected = 10 * float(task.inside(half["points"], half).mean())
    assert expected > 8
    distance = 20 * float(mdf(away(x0, x0, x0), x0).sum().detach())
    rounded = allowed(torch.float32, 32 * 16 * 3) * float(loss.detach()) / int(items)
    assert (float(loss.detach()) - distance) / int(items) == pytest.approx(expected, abs=rounded)
    # points at the edge are pulled back: a small step against the gradient of the collision term moves them inside
    edge = torch.nn.Parameter(batch["points"].clone() * 1.5)
    before = task.inside(edge, batch)
    (1 - before).sum().backward()
    assert edge.grad is not None
    pulled = edge.grad.norm(dim=-1) > 1e-3
    assert pulled.sum() >= 10
    step = 1e-3 * torch.nn.functional.normalize(edge.grad, dim=-1)  # mm, much less than a voxel
    with torch.no_grad():
        assert (task.inside(edge - step, batch) > before)[pulled].all()
        assert (task.inside(edge + step, batch) < before)[pulled].all()


@pytest.mark.slow
def test_training_reduces_the_loss(task: TractoDiff) -> None:
    batch = task.train.spread(32)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss, items = task.loss(task.model, batch)
        optimizer.zero_grad()
        (loss / items).backward()
        optimizer.step()
        losses.append(float(loss.detach()) / int(items))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# Metrics


def test_the_baseline_extrapolates_linearly(task: TractoDiff) -> None:
    batch = task.dataset("val").spread(4096)
    steps = torch.arange(1, 17)[:, None] * task.mean_step
    expected = mdf(batch["condition"][:, None, -3:] * steps, batch["points"]).mean()
    baseline = task.baselines()
    assert baseline["mdf_mm"] == pytest.approx(float(expected))
    assert task.mean_step == pytest.approx(1.0, abs=0.02)
    assert 0 < baseline["inside"] < 1


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("data", ["volume", "bundles"])
def test_the_nearest_piece_baseline_copies_the_nearest_piece(
    data: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(cache, monkeypatch, data=data)
    batch = task.dataset("val").spread(20)
    train, tracts = task.train, task.tracts
    middles = [
        affine @ [*(shape - 1) / 2, 1]
        for affine, shape in zip(tracts.affines, tracts.fields.shapes.numpy(), strict=True)
    ]
    rows = [i for i in range(len(train)) if train.num_left[i] >= 16 and train.num_known[i] >= 1]
    train.num_remembered[:] = 8
    whole = train.__getitems__(rows)
    result = train.nearest(batch)
    for i in range(20):
        place = [
            each["start"].double() - torch.tensor(np.array(middles))[each["subject"], :3] for each in (whole, batch)
        ]
        apart = (place[0] - place[1][i]).norm(dim=1)
        turned = (whole["condition"][:, -3:] - batch["condition"][i, -3:]).norm(dim=1)
        copied = (whole["points"] == result[i]).all(dim=2).all(dim=1)
        assert copied.any()
        cost = apart**2 + (8 * task.mean_step * turned) ** 2
        # lint-tests: tolerance: in mm², for a cost of 0
        assert float(cost[copied].min()) <= float(cost.min()) * 1.05 + 1e-6
    assert task.baselines()["mdf_mm_nearest_piece"] < 0.5 * task.baselines()["mdf_mm"]


def test_the_nearest_piece_baseline_is_exact_on_training_data(task: TractoDiff) -> None:
    rows = ((task.train.num_left >= 16) & (task.train.num_known >= 8)).nonzero()[::500, 0]
    task.train.num_remembered[:] = 8
    batch = task.train.__getitems__(rows.tolist())
    assert_close(task.train.nearest(batch), batch["points"], terms=16)


def test_metrics_are_computed_on_sampled_pieces(task: TractoDiff) -> None:
    batch = task.dataset("val").spread(8)
    x0 = batch["points"] / task.model.scale
    with torch.no_grad():
        metrics = task.evaluate(Knowing(x0), batch)
        (distance, count), (inside, points) = metrics["mdf_mm"], metrics["inside"]
        assert float(distance) == pytest.approx(0, abs=8 * 16 * torch.finfo(torch.float32).eps)
        assert (count, points) == (8, 128)
        assert float(inside) > 0.9 * 128
        torch.manual_seed(0)
        first = task.evaluate(task.model.eval(), batch)["mdf_mm"][0]
        torch.manual_seed(0)
        assert torch.equal(first, task.evaluate(task.model, batch)["mdf_mm"][0])


class Knowing(torch.nn.Module):
    """Returns the true pieces of a batch, followed by every second piece again."""

    def __init__(self, x0: Tensor) -> None:
        super().__init__()
        self.x0 = x0

    def forward(self, noisy: Tensor, step: Tensor, condition: Tensor) -> Tensor:
        return torch.cat([self.x0, self.x0[::2]])[: len(noisy)]


# Growing


def test_streamlines_are_extended_in_both_directions() -> None:
    """A model that continues in the last direction, or along R at a seed, draws a line through the whole box."""
    histories = []

    def draw(tails: Tensor) -> Tensor:
        assert tails.shape[1:] == (9, 3)
        direction = unit_steps(tails)[:, -1]
        histories.append((unit_steps(tails).norm(dim=2) > 0).sum(dim=1).tolist())
        direction = torch.where(direction.norm(dim=1, keepdim=True) > 0, direction, torch.tensor([1.0, 0, 0]))
        return tails[:, -1:] + direction[:, None] * torch.arange(1, 17)[:, None]

    def inside(points: Tensor) -> Tensor:
        return ((points >= 0) & (points <= 30)).all(dim=1)

    seeds = torch.tensor([[10.0, 5, 5], [29.0, 1, 2], [15.0, 0, 0]])
    lines = generate_streamlines(draw, inside, seeds, advance=8, max_points=100)
    for seed, line in zip(seeds, lines, strict=True):
        assert line[:, 0].tolist() == list(range(31))
        assert (line[:, 1:] == seed[1:]).all()
    assert histories[0] == [0, 0, 0]  # seeds have no history
    assert histories[1] == [8, 8]  # one line has left the box
    assert [8, 1, 8] in histories  # the forward part is the history of the backward part
    short = generate_streamlines(draw, inside, seeds, advance=16, max_points=5)
    assert [len(line) for line in short] == [11, 7, 11]


def test_a_seed_without_extension_stays_a_point() -> None:
    def draw(tails: Tensor) -> Tensor:
        return tails[:, -1:] + torch.arange(1.0, 17)[:, None]

    (line,) = generate_streamlines(
        draw, lambda points: torch.zeros(len(points), dtype=torch.bool), torch.zeros(1, 3), advance=8, max_points=9
    )
    assert line.tolist() == [[0, 0, 0]]


def predict(task: TractoDiff, seed: int = 0, **options: Any) -> Any:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        (prediction,) = task.predict(task.model.eval(), generator, **{"seeds": 6, "max_points": 24, **options})
        (combined,) = task.combine_predictions([prediction.part])
        return replace(prediction, files={**prediction.files, **combined.files}, plots=combined.plots)


def test_the_mask_is_converted_once(task: TractoDiff, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask may have millions of voxels, and each step of a streamline looks up points in it."""
    calls: list[Fields] = []
    convert = Fields.mask.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Fields, "mask", property(lambda fields: calls.append(fields) or convert(fields)))
    for advance in (8, 2):
        predict(task, seeds=2, advance=advance)
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seeds_from", ["streamlines", "mask"])
def test_other_programs_open_written_streamlines(task: TractoDiff, tmp_path: Path, seeds_from: str) -> None:
    from dipy.io.streamline import load_tractogram

    prediction = predict(task, seeds_from=seeds_from)
    file = tmp_path / "grown.trk"
    file.write_bytes(prediction.files["small_64D.trk"])
    figures = json.loads(prediction.files["small_64D.json"])
    opened = nibabel.streamlines.load(file)
    assert len(opened.streamlines) == figures["streamlines"] > 0
    assert_close(opened.affine, task.tracts.affines[0], terms=4, dtype=torch.float32)
    assert opened.header["dimensions"].tolist() == [10, 10, 10]
    assert len(load_tractogram(str(file), "same")) == figures["streamlines"]  # also checks the bounds
    points = torch.from_numpy(np.concatenate(list(opened.streamlines)))
    inside = task.tracts.fields.mask.sample(points, torch.zeros(len(points), dtype=torch.long))
    assert float((inside >= 0.49).float().mean()) > 0.95  # a held-out seed may be just outside
    assert ("mdf_to_real_through_seed_mm" in figures) == (seeds_from == "streamlines")
    assert prediction.items >= 2 * figures["streamlines"]
    assert prediction.plots["small_64D.png"].startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_streamlines(task: TractoDiff) -> None:
    first = predict(task, 1).files["small_64D.trk"]
    assert predict(task, 1).files["small_64D.trk"] == first
    assert predict(task, 2).files["small_64D.trk"] != first


@pytest.mark.slow
@pytest.mark.parametrize("split", ["val", "test"])
def test_generated_streamlines_are_compared_with_the_requested_split(task: TractoDiff, split: str) -> None:
    options: dict[str, Any] = {} if split == "test" else {"split": split}  # the default is test
    prediction = predict(task, **options)
    figures = json.loads(prediction.files["small_64D.json"])
    assert figures["split"] == split
    assert figures["real_streamlines"] == len(task.tracts.streamlines(split, 0))
    assert "no test" not in prediction.text


@pytest.mark.slow
def test_val_is_used_if_there_is_no_test_split(task: TractoDiff) -> None:
    task.tracts.split[task.tracts.split == 2] = 0
    prediction = predict(task)
    assert prediction.text.startswith("no test streamlines")
    assert json.loads(prediction.files["small_64D.json"])["split"] == "val"


def test_written_lines_are_read_back_unchanged() -> None:
    affine = np.array([[0, -2.0, 0, 20], [-1.94, 0, -0.487, 25], [-0.487, 0, 1.94, 12], [0, 0, 0, 1]])
    rng = np.random.default_rng(0)
    lines = [rng.uniform(0, 20, (count, 3)).astype(np.float32) for count in (2, 30, 17)]
    opened = nibabel.streamlines.load(io.BytesIO(trk(lines, affine, (10, 11, 12))))
    for line, back in zip(lines, opened.streamlines, strict=True):
        assert_close(back, line, terms=2 * 4)


@pytest.mark.slow
def test_shards_generate_the_same_streamlines_as_one_process(task: TractoDiff) -> None:
    def generated(**options: Any) -> dict[str, bytes]:
        return {name: content for each in batches(task, **options) for name, content in each.files.items()}

    whole = generated()
    assert len(whole) == 2 * 4
    assert generated(shard=0, num_shards=2) | generated(shard=1, num_shards=2) == whole


def batches(task: TractoDiff, **options: Any) -> list[Prediction]:
    """Return the predictions of seven seeds in batches of two."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return list(task.predict(task.model.eval(), generator, seeds=7, max_points=24, batch_size=2, **options))


@pytest.mark.parametrize("seeds_from", ["streamlines", "mask"])
def test_results_of_a_subject_cover_all_batches(task: TractoDiff, seeds_from: Any) -> None:
    predictions = batches(task, seeds_from=seeds_from)
    assert len(predictions) == 4
    (combined,) = task.combine_predictions([json.loads(json.dumps(made.part)) for made in predictions])
    figures = json.loads(combined.files["small_64D.json"])  # type: ignore[arg-type]
    written = [
        line.astype(np.float32)
        for made in predictions
        for name, content in made.files.items()
        if name.endswith(".tck")
        for line in nibabel.streamlines.load(io.BytesIO(content)).streamlines
    ]
    assert (figures["seeds"], figures["streamlines"]) == (7, len(written))
    mean = float(np.mean([length(line) for line in written]))
    assert_close(torch.tensor(figures["mean_length_mm"]), torch.tensor(mean), terms=50)
    assert figures["seconds_per_streamline"] == sum(made.part["seconds"] for made in predictions) / 7
    assert list(combined.plots) == ["small_64D.png"]
    assert not combined.items, "combined results are also printed after the first predictions"
    if seeds_from == "streamlines":
        affine, real = task.tracts.affines[0], [line.numpy() for line in task.tracts.streamlines("test", 0)]
        seen, truth = voxels(written, affine), voxels(real, affine)
        assert figures["bundles"]["small_64D"]["overlap"] == len(seen & truth) / len(truth)
        assert figures["bundles"]["small_64D"]["seeds"] == 7


def test_bundle_results_compare_voxels(task: TractoDiff) -> None:
    tracking = Tracking(task.tracts, "test")
    real = [line.numpy() for line in task.tracts.streamlines("test", 0)]
    partners = list(range(len(real)))
    found: Any = tracking.figures(0, partners, real)["bundles"]["small_64D"]
    assert (found["overlap"], found["overreach"], found["mdf_to_real_through_seed_mm"]) == (1, 0, 0)
    assert found["valid_connections"] == 1
    affine = task.tracts.affines[0]
    far = [line + affine[:3, :3] @ [100, 0, 0] for line in real]
    found = tracking.figures(0, partners, far)["bundles"]["small_64D"]
    assert (found["overlap"], found["overreach"], found["valid_connections"]) == (0, 1, 0)
    half = [line if number % 2 else line[:1] for number, line in enumerate(real)]  # every other seed was not extended
    found = tracking.figures(0, partners, half)["bundles"]["small_64D"]
    assert found["valid_connections"] == (len(real) // 2) / len(real)


def test_valid_connections_have_the_ends_of_one_real_line() -> None:
    one, other = (np.array([[0.0, y, 0], [5, 9, 9], [10, y, 0]]) for y in (0, 20))
    line = np.array([[1.0, 0, 0], [4, 4, 4], [10, 1, 0]])
    assert connects(line, ends_of([one]), 1.0)
    assert connects(line[::-1], ends_of([other, one]), 1.0)
    assert not connects(line, ends_of([one]), 0.99)
    assert not connects(line[:2], ends_of([one]), 1.0)  # the second end is too far away
    crossing = np.array([[0.0, 0, 0], [10, 20, 0]])  # connects the ends of two different lines
    assert not connects(crossing, ends_of([one, other]), 1.0)


@pytest.mark.slow
def test_another_program_reads_written_tck_files(task: TractoDiff) -> None:
    files = predict(task).files
    lines = [nibabel.streamlines.load(io.BytesIO(files[f"small_64D.{kind}"])).streamlines for kind in ("trk", "tck")]
    for one, other in zip(*lines, strict=True):
        assert_close(one, other, terms=2 * 4)


@pytest.mark.parametrize("options", [{"advance": 17}, {"steps": 11}])
def test_invalid_advance_and_steps_are_rejected(task: TractoDiff, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        predict(task, **options)


@pytest.mark.slow
def test_ddim_generates_streamlines(task: TractoDiff) -> None:
    assert predict(task, steps=3).files["small_64D.trk"] != predict(task).files["small_64D.trk"]
