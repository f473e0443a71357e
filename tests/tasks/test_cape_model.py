"""Predictions depend on the support, not on invisible keypoints or padding; decoding agrees with training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runner.tasks.cape.attention import DeformableMapAttention, Maps, cell_centers, level_sides, sample
from runner.tasks.cape.backbone import FrozenBatchNorm2d, PretrainedResNet50
from runner.tasks.cape.layers import split_layers
from runner.tasks.cape.metrics import score_keypoints, score_predictions, target_types
from runner.tasks.cape.model import COORDINATE, END, CoordinateEmbedding, KeypointPredictions, PoseTransformer, Shape
from runner.tasks.cape.model import decode as decode_with_gradients
from runner.tasks.cape.task import SHAPES, CategoryAgnosticPose
from torch import Tensor, nn

from tests.rounding import PROMISED, assert_close

SMALL = Shape(
    stem=8,
    stages=((8, 1), (16, 1)),
    published=False,
    num_levels=2,
    width=16,
    num_heads=2,
    feed_forward=32,
    support_layers=1,
    encoder_layers=1,
    decoder_layers=2,
    grid=8,
)
# Convolutions, then five sums per transformer layer, each with at most as many terms as the image has cells.
TERMS = (3 + 5 * 4) * 2 * SMALL.grid**2
KINDS = ["dense", "deformable"]
Batch = dict[str, Tensor]


def make_model(kind: str = "dense", *, pretrained: bool = False) -> PoseTransformer:
    torch.manual_seed(0)
    model = PoseTransformer(replace(SMALL, attention=kind, pretrained=pretrained))  # type: ignore[arg-type]
    for weight in model.parameters():  # far from the initial values, so that differences are visible
        with torch.no_grad():
            weight.add_(0.05 * torch.randn_like(weight))
    return model.eval()


def make_task(model: nn.Module, forget: float = 0.0) -> CategoryAgnosticPose:
    task = object.__new__(CategoryAgnosticPose)  # loss and metrics need no data
    task.model, task.forget = model, forget
    return task


def make_batch(counts: tuple[int, ...] = (5, 3), queries: int = 2, max_keypoints: int = 5) -> Batch:
    """Return episodes with `counts` keypoints. Keypoint 1 of supports and keypoint 2 of queries are invisible."""
    generator = torch.Generator().manual_seed(1)
    B, Q, K = len(counts), queries, max_keypoints
    present = torch.arange(K) < torch.tensor(counts)[:, None]
    visible = present[:, None].expand(B, 1 + Q, K).clone()
    visible[:, 0, 1] = visible[:, 1:, 2] = False
    xy = torch.rand(B, 1 + Q, K, 2, generator=generator) * visible[..., None]
    images = torch.rand(B, 1 + Q, 3, 32, 32, generator=generator)
    return {
        "support_image": images[:, 0],
        "support_xy": xy[:, 0],
        "support_visible": visible[:, 0],
        "present": present,
        "query_image": images[:, 1:],
        "query_xy": xy[:, 1:],
        "query_visible": visible[:, 1:],
        "query_size": torch.full((B, Q), 0.5),
    }


def decode(model: Any, batch: Mapping[str, Tensor]) -> KeypointPredictions:
    with torch.no_grad():
        return decode_with_gradients(model, batch)


def rows_of(batch: Batch, rows: slice) -> Batch:
    return {name: value[rows] for name, value in batch.items()}


# The support


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoding", [False, True])
def test_the_prediction_depends_on_the_support(kind: str, decoding: bool) -> None:
    model, batch = make_model(kind), make_batch()
    with torch.no_grad():
        call = decode if decoding else lambda model, batch: model(batch)
        before = call(model, batch)
        for name, changed in {
            "support_image": 1 - batch["support_image"],
            "support_xy": 1 - batch["support_xy"],
            "support_visible": batch["present"],
        }.items():
            after = call(model, {**batch, name: changed})
            real = F.pad(batch["present"].repeat_interleave(2, 0), (0, 1))
            assert ((after.xy[:, -1] - before.xy[:, -1]).abs().amax(-1)[real] > 1e-5).float().mean() > 0.9, name


def test_every_prediction_depends_on_every_support_keypoint() -> None:
    model, batch = make_model(), make_batch((5,))
    xy = batch["support_xy"].requires_grad_()
    predictions = model(batch)
    for point in range(5):
        (gradient,) = torch.autograd.grad(predictions.xy[0, -1, point].sum(), xy, retain_graph=True)
        reached = gradient[0].abs().sum(dim=-1) > 0
        assert reached.tolist() == batch["support_visible"][0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    torch.manual_seed(0)
    model = PoseTransformer(replace(SMALL, attention=kind))  # type: ignore[arg-type]
    make_task(model, forget=0.3).loss(model, make_batch((5, 3, 5, 4)))[0].backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


# Invisible keypoints and padding


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("value", [0.3, math.nan, math.inf])
def test_invisible_and_missing_keypoints_do_not_affect_the_loss(value: float) -> None:
    model, batch = make_model(), make_batch()
    expected, items = make_task(model).loss(model, batch)
    expected.backward()
    gradients = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    changed = dict(batch)
    for name in ("support", "query"):
        changed[f"{name}_xy"] = torch.where(batch[f"{name}_visible"][..., None], batch[f"{name}_xy"], value)
    loss, again = make_task(model).loss(model, changed)
    loss.backward()
    assert int(again) == int(items) == int(batch["query_visible"].sum())
    assert torch.equal(loss, expected)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(torch.as_tensor(weight.grad), torch.as_tensor(gradient))
    with torch.no_grad():
        measures = make_task(model).evaluate(model, changed)
    assert all(math.isfinite(float(total)) for total, _ in measures.values())


def test_padding_does_not_change_the_output() -> None:
    model, batch = make_model(), make_batch((3, 2), max_keypoints=3)
    padded = make_batch((3, 2), max_keypoints=3)
    for name in ("support_xy", "query_xy"):
        padded[name] = F.pad(batch[name], (0, 0, 0, 4), value=0.7)
    for name in ("support_visible", "query_visible", "present"):
        padded[name] = F.pad(batch[name], (0, 4))
    torch.testing.assert_close(make_task(model).loss(model, padded)[0], make_task(model).loss(model, batch)[0])
    short, long = decode(model, batch), decode(model, padded)
    assert_close(long.xy[:, :, :4], short.xy, TERMS, growth=2.0)
    assert_close(long.types[:, :, :4], short.types, TERMS, growth=2.0)


def test_the_loss_is_a_sum_over_episodes() -> None:
    model, batch = make_model(), make_batch((5, 3, 2))
    task = make_task(model)
    whole, items = task.loss(model, batch)
    parts = [task.loss(model, rows_of(batch, slice(row, row + 1))) for row in range(3)]
    torch.testing.assert_close(whole, torch.stack([part for part, _ in parts]).sum())
    assert int(items) == sum(int(count) for _, count in parts)


def test_the_loss_is_float32_under_autocast() -> None:
    model, batch = make_model(), make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert make_task(model).loss(model, batch)[0].dtype == torch.float32
        assert decode(model, batch).xy.dtype == torch.float32


def test_the_loss_equals_a_computation_by_hand() -> None:
    batch = make_batch((3,), queries=1, max_keypoints=3)
    batch["query_xy"] = torch.tensor([[[[0.2, 0.4], [0.5, 0.5], [0.0, 0.0]]]])
    batch["query_visible"] = torch.tensor([[[True, False, False]]])
    xy = torch.tensor([[[[0.3, 0.4], [0.9, 0.9], [0.1, 0.1], [0.5, 0.5]]]])
    predictions = KeypointPredictions(xy[0], xy.repeat(1, 2, 1, 1), torch.zeros(1, 2, 4, 2))
    loss, items = make_task(nn.Identity()).loss(lambda _: predictions, batch)  # type: ignore[arg-type]
    # the L1 distance of one point in the proposals and two layers; the types of the point and of the end in two layers
    assert float(loss) == pytest.approx(3 * 5 * 0.1 + 2 * 2 * math.log(2))
    assert int(items) == 1


def test_queries_without_visible_keypoints_have_no_loss() -> None:
    model, batch = make_model(), make_batch()
    task = make_task(model)
    nothing = {**batch, "query_visible": torch.zeros_like(batch["query_visible"])}
    loss, items = task.loss(model, nothing)
    assert (float(loss.detach()), int(items)) == (0.0, 0)
    loss.backward()
    assert all(not weight.grad.any() for weight in model.parameters() if weight.grad is not None)
    half = {**batch, "query_visible": batch["query_visible"].clone()}
    half["query_visible"][1] = False
    alone, count = task.loss(model, rows_of(batch, slice(0, 1)))
    together, both = task.loss(model, half)
    torch.testing.assert_close(together, alone)
    assert int(both) == int(count)


# Layers


def composed(model: PoseTransformer) -> Any:
    first, *rest = split_layers(model)

    def call(*inputs: Any) -> KeypointPredictions:
        value = first(*inputs)
        for layer in rest:
            value = layer(value)
        return value

    return call


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", [*KINDS, "pretrained"])
def test_composed_layers_equal_the_model(kind: str) -> None:
    model = make_model("deformable" if kind == "pretrained" else kind, pretrained=kind == "pretrained")
    batch = make_batch((5, 3, 4))
    for one, other in zip(composed(model)(batch), model(batch), strict=True):
        assert torch.equal(one, other)
    held = {weight for layer in split_layers(model) for weight in layer.parameters()}
    assert held == set(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_decode_like_the_model(kind: str) -> None:
    model, batch = make_model(kind), make_batch((5, 4))
    for one, other in zip(decode(composed(model), batch), decode(model, batch), strict=True):
        assert_close(one, other, TERMS)


# Decoding


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_does_not_depend_on_the_batch(kind: str) -> None:
    model, batch = make_model(kind), make_batch((5, 3, 1))
    together = decode(model, batch)
    for row in range(3):
        alone = decode(model, rows_of(batch, slice(row, row + 1)))
        assert_close(alone.xy, together.xy[2 * row : 2 * row + 2], TERMS, growth=2.0)
        assert_close(alone.types, together.types[2 * row : 2 * row + 2], TERMS)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_teacher_forcing_with_predictions(kind: str) -> None:
    model, batch = make_model(kind), make_batch((5, 4))
    decoded = decode(model, batch)
    own = decoded.xy[:, -1, :-1].view_as(batch["query_xy"])
    with torch.no_grad():
        fed = model({**batch, "query_xy": own, "query_visible": torch.ones(own.shape[:-1], dtype=torch.bool)})
    for one, other in zip(decoded, fed, strict=True):
        assert_close(one, other, TERMS)


def test_decoding_does_not_see_the_targets() -> None:
    model, batch = make_model(), make_batch()
    blind = {
        **batch,
        "query_xy": torch.full_like(batch["query_xy"], math.nan),
        "query_visible": torch.zeros_like(batch["query_visible"]),
    }
    for one, other in zip(decode(model, batch), decode(model, blind), strict=True):
        assert torch.equal(one, other)


def test_a_keypoint_attends_only_to_earlier_keypoints() -> None:
    model, batch = make_model(), make_batch((5,))
    with torch.no_grad():
        before = model(batch)
        for point in (0, 1, 3):
            changed = {**batch, "query_xy": batch["query_xy"].clone()}
            changed["query_xy"][:, :, point] = 0.9
            after = model(changed)
            assert torch.equal(before.xy[:, :, : point + 1], after.xy[:, :, : point + 1])
            assert not torch.allclose(
                before.xy[:, :, point + 1], after.xy[:, :, point + 1], atol=PROMISED[torch.float32]
            )


def test_keypoint_dropout_acts_only_in_training() -> None:
    model, batch = make_model(), make_batch()
    task = make_task(model, forget=0.5)
    assert torch.equal(task.loss(model, batch)[0], task.loss(model, batch)[0])
    model.train()
    assert not torch.equal(task.loss(model, batch)[0], task.loss(model, batch)[0])


# Metrics


def test_keypoints_after_the_end_are_not_hits() -> None:
    batch = make_batch((4, 2), queries=1, max_keypoints=4)
    batch["query_visible"] = batch["present"][:, None].clone()
    xy = F.pad(batch["query_xy"].flatten(0, 1), (0, 0, 0, 1))[:, None]
    kinds = torch.full((2, 1, 5), COORDINATE)
    kinds[0, 0, 2] = kinds[1, 0, 2] = END  # the first query ends too early
    predictions = KeypointPredictions(xy[:, 0], xy, F.one_hot(kinds, 2).float())
    hits, distances, result = score_predictions(predictions, batch)
    assert hits.sum(dim=-1).flatten().tolist() == [2, 2]
    assert result.flatten().tolist() == [False, True]
    assert distances.sum() == 0


def test_pck_counts_keypoints_within_a_distance() -> None:
    batch = make_batch((3,), queries=1, max_keypoints=3)
    batch["query_visible"] = torch.tensor([[[True, True, False]]])
    away = torch.tensor([0.099, 0.101, 0.0])  # the longer side of the box is half of the picture
    hits, distances = score_keypoints(batch["query_xy"] + torch.stack([away, torch.zeros(3)], dim=-1), batch)
    assert hits.flatten().tolist() == [True, False, False]
    torch.testing.assert_close(distances.flatten(), torch.tensor([0.198, 0.202, 0.0]))


def test_target_types_end_after_the_last_keypoint() -> None:
    batch = make_batch((4, 2), queries=1, max_keypoints=4)
    types, counted = target_types(batch)
    assert (types == END).nonzero().tolist() == [[0, 4], [1, 2]]
    assert counted.tolist() == [[True, True, False, True, True], [True, True, True, False, False]]


# Parts


def test_features_are_sampled_at_the_keypoint() -> None:
    shapes = ((4, 4), (2, 2))
    places = cell_centers(shapes, torch.device("cpu"))
    features = places[None].expand(3, -1, -1)  # each feature equals its position
    maps = Maps(features, shapes, level_sides(shapes, places.device), places)
    xy = torch.tensor([[[0.3, 0.6], [0.5, 0.25]]]).expand(3, -1, -1)
    torch.testing.assert_close(sample(maps.levels(), xy), xy)


def test_coordinate_embeddings_are_interpolated_bilinearly() -> None:
    embed = CoordinateEmbedding(5, 8)
    nn.init.normal_(embed.table)
    entry = embed.table[:, 3, 1]
    torch.testing.assert_close(embed(torch.tensor([[[0.25, 0.75]]]))[0, 0], entry)
    middle = (embed.table[:, 3, 1] + embed.table[:, 3, 2]) / 2
    torch.testing.assert_close(embed(torch.tensor([[[0.375, 0.75]]]))[0, 0], middle)


def test_deformable_attention_samples_around_its_reference_point() -> None:
    torch.manual_seed(0)
    attention = DeformableMapAttention(8, num_heads=2, num_levels=1)
    for weight in attention.offsets.parameters():
        nn.init.zeros_(weight)
    shapes = ((6, 6),)
    sides, places = (make(shapes, torch.device("cpu")) for make in (level_sides, cell_centers))
    maps = Maps(torch.randn(2, 36, 8), shapes, sides, places)
    at = maps.positions[[7, 20]].expand(2, -1, -1)
    expected = attention.output(attention.value(maps.tokens[:, [7, 20]]))
    # with zero offsets and weights that sum to 1, the result is the value of the cell
    torch.testing.assert_close(attention(torch.randn(2, 2, 8), at, attention.prepare(maps)), expected)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_published_size_uses_a_resnet_50(kind: str) -> None:
    with torch.device("meta"):
        model = PoseTransformer(replace(SHAPES["full"], attention=kind))  # type: ignore[arg-type]
        maps = model.backbone(torch.empty(1, 3, 256, 256))
    # ResNet-50 has 25,557,032 parameters, 2,049,000 of them in the classifier; group and batch norms have equally many
    assert sum(weight.numel() for weight in model.backbone.parameters()) == 25_557_032 - 2_049_000
    assert [tuple(level.shape) for level in maps] == [(1, 512, 32, 32), (1, 1024, 16, 16), (1, 2048, 8, 8)]


def test_the_pretrained_backbone_is_a_torchvision_resnet_50() -> None:
    torch.manual_seed(0)
    backbone = PretrainedResNet50(3)
    state = backbone.state_dict()
    sizes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert len(sizes) == 53 * 5  # 53 convolutions, each with a norm of four tensors
    assert sizes["layer3.5.conv3.weight"] == (1024, 256, 1, 1)
    assert sizes["layer2.0.downsample.1.running_var"] == (512,)
    # ResNet-50 without its classifier, as above; the weights and biases of norms are buffers
    norms = sum(state[name].numel() for name in state if name.endswith((".running_mean", "bn1.running_mean")))
    assert sum(weight.numel() for weight in backbone.parameters()) == 25_557_032 - 2_049_000 - 2 * norms
    maps = backbone(torch.rand(1, 3, 64, 64))
    assert [tuple(level.shape) for level in maps] == [(1, 512, 8, 8), (1, 1024, 4, 4), (1, 2048, 2, 2)]


@pytest.mark.slow
def test_pretrained_feature_maps_match_those_of_torchvision() -> None:
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    other = models.resnet50(weights=None).eval().double()
    state = {name: tensor for name, tensor in other.state_dict().items() if not name.endswith("num_batches_tracked")}
    for name, tensor in state.items():
        if "bn" in name or "downsample.1" in name:
            tensor.uniform_(0.5, 1.5)
    backbone = PretrainedResNet50(3).double()
    assert backbone.state_dict().keys() == state.keys() - {"fc.weight", "fc.bias"}
    backbone.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("fc.")})
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    normalize = pytest.importorskip("torchvision.transforms.functional").normalize
    mean, std = (torch.tensor(each).tolist() for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))  # float32
    x = normalize(images, mean, std)
    x = other.maxpool(other.relu(other.bn1(other.conv1(x))))
    expected = [x := stage(x) for stage in (other.layer1, other.layer2, other.layer3, other.layer4)][1:]
    maps = backbone(images)
    assert len(maps) == len(expected)
    for level, same in zip(maps, expected, strict=True):
        assert_close(level, same, terms=50 * 2048, growth=50)


def test_a_frozen_norm_is_batch_norm_in_eval_mode() -> None:
    torch.manual_seed(0)
    norm, frozen, x = torch.nn.BatchNorm2d(4).eval(), FrozenBatchNorm2d(4), torch.randn(2, 4, 3, 3)
    state = {name: tensor.uniform_(0.5, 2) for name, tensor in norm.state_dict().items() if tensor.is_floating_point()}
    frozen.load_state_dict(state)
    torch.testing.assert_close(frozen(x), norm(x))
    assert not list(frozen.parameters())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_overfits_one_episode(kind: str) -> None:
    torch.manual_seed(0)
    model = PoseTransformer(replace(SMALL, attention=kind))  # type: ignore[arg-type]
    task, batch = make_task(model), make_batch((5,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss, items = task.loss(model, batch)
        optimizer.zero_grad()
        (loss / items).backward()
        optimizer.step()
    hits, _, result = score_predictions(decode(model.eval(), batch), batch)
    assert hits.sum() >= 7  # of eight, because decoding continues from its own predictions
    assert result.all()
