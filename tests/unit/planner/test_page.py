"""The page of a job: its drawings, well-formed in every case, and hostile text that does no harm."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.forecast.device import GIB, device_named
from dslpar.forecast.part_terms import Sent
from dslpar.forecast.plan import Forecast, Machine, forecast
from dslpar.forecast.workload import workload_of
from dslpar.layout import bubble
from dslpar.layout.resolve import Job
from dslpar.linter.check import load_text, resolve
from dslpar.planner import show
from dslpar.planner.page import as_html, pictures
from dslpar.planner.pictures import memory, mesh, stages, traffic
from dslpar.reporting import expert_loads
from dslpar.reporting.expert_loads import LayerLoad
from dslpar.reporting.run_dir import EXPERTS
from tests.support.lint import BATCH, MODEL

SVG = "{http://www.w3.org/2000/svg}"
PIPELINE = "parallel = dict(pipeline=4, tensor=dict(size=2, mode='1d'))\nbatch = dict(accumulation=8)\n"
LARGE = (
    "model = dict(type='GPT', num_layers=32, hidden_size=8192, num_heads=64, vocab_size=50304, max_seq_len=2048)\n"
    "zero = dict(stage=1)\n"
)
HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\n\u202e.py"
VOID = {"meta", "link"}


def job_of(text: str, world: int = 16, path: str = "cfg.py") -> Job:
    return resolve(load_text(text, path), world)


def forecast_of(job: Job, device: str = "h100-80g") -> Forecast:
    workload = workload_of(job)
    assert workload is not None
    return forecast(workload, Machine.usual(device_named(device)))


CASES = {
    "pipeline": (MODEL + PIPELINE, 16, True),
    "no device": (MODEL + PIPELINE, 16, False),
    "large": (LARGE + PIPELINE, 64, True),
    "one rank": (MODEL, 1, True),
    "cuboid": (MODEL + BATCH + "parallel = dict(tensor=dict(size=8, mode='3d'))\n", 16, True),
    "chunks": (MODEL + PIPELINE + "schedule = dict(type='zero_bubble', num_model_chunks=2)\n", 16, True),
    "unknown model": (
        "model = dict(type='torchvision.models.resnet18')\n"
        "parallel = dict(pipeline=dict(size=2, method='uniform'))\nbatch = dict(accumulation=2)\n",
        4,
        False,
    ),
    "thousands of ranks": (MODEL + PIPELINE, 4096, True),
    "a world that 8 does not divide": (MODEL + PIPELINE.replace("pipeline=4, ", ""), 6, False),
}


def case(name: str) -> tuple[Job, Forecast | None]:
    text, world, with_device = CASES[name]
    job = job_of(text, world)
    return job, forecast_of(job) if with_device else None


class Page(HTMLParser):
    """Elements in order, text, and whether every element is closed at the right place."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> Iterator[dict[str, str]]:
        return (attributes for name, attributes in self.elements if name == tag)


@pytest.mark.parametrize("name", CASES)
def test_the_page_is_well_formed(name: str) -> None:
    page = Page(as_html(*case(name)))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = [
        part
        for _, attributes in page.elements
        for key in ("aria-labelledby", "aria-describedby")
        for part in attributes.get(key, "").split()
    ]
    references += [each["href"][1:] for each in page.named("a")]
    assert references
    assert set(references) <= set(ids)
    assert all(each.get("scope") == "col" for each in page.named("th"))


@pytest.mark.parametrize("name", CASES)
def test_each_picture_stands_alone_and_says_what_it_is(name: str) -> None:
    job, made = case(name)
    drawn = pictures(job, made)
    assert {"mesh", "stages"} <= set(drawn)
    assert ("schedule" in drawn) == (job.mesh.pipe > 1)
    assert ("memory" in drawn) == (workload_of(job) is not None)
    assert ("traffic" in drawn) == (made is not None and job.mesh.world_size > 1)
    assert "losses" not in drawn
    page = as_html(job, made)
    for picture in drawn.values():
        root = ElementTree.fromstring(picture)
        title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        assert title is not None
        assert title.text
        assert description is not None
        assert description.text
        assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert "@media(prefers-color-scheme:dark)" in "".join(style.text or "" for style in root.iter(f"{SVG}style"))
        assert f'id="{title.get("id")}"' in page
        low, _, width, _ = map(float, root.get("viewBox", "").split())
        assert float(root.get("width", "")) == width
        for rect in root.iter(f"{SVG}rect"):
            left = float(rect.get("x", "0"))
            assert low <= left
            assert left + float(rect.get("width", "")) <= low + width + 0.1


@pytest.mark.parametrize("name", CASES)
def test_the_same_job_gives_the_same_page(name: str) -> None:
    job, made = case(name)
    again, made_again = case(name)
    assert as_html(job, made) == as_html(again, made_again)
    assert pictures(job, made) == pictures(again, made_again)


def test_nothing_is_asked_for_and_only_the_page_s_own_style_and_script_count() -> None:
    text = as_html(*case("large"))
    page = Page(text)
    (policy,) = (each["content"] for each in page.named("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    for _, attributes in page.elements:
        assert not {"src", "style", "srcset"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith(("#", "data:"))
    assert set(re.findall(r"[a-z]+://[^\"'\s<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_both_schemes_have_all_colours() -> None:
    text = as_html(*case("pipeline"))
    schemes = [set(re.findall(r"--([a-z]+):", rule)) for rule in re.findall(r"\{(color-scheme:[^}]*)\}", text)]
    assert len(schemes) == 4  # each by the viewer's preference, and by the button
    assert all(names == schemes[0] for names in schemes)
    assert set(re.findall(r"var\(--([a-z]+)\)", text)) <= schemes[0]


# ---- hostile text ----


def test_a_script_in_names_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(2)<" / "script>&\"'"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5, "<script>": 1}\nno record\n'
    )
    job = job_of(MODEL + PIPELINE + f"train = dict(output_dir={str(folder)!r})\n", path=HOSTILE)
    made = forecast_of(job)
    text = as_html(job, made)
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert text.count("<script>") == 1
    assert "alert(1)" in "".join(page.texts)
    assert str(folder) in "".join(page.texts)
    for written in (text, *pictures(job, made).values()):
        assert "\x1b" not in written
        assert "\u202e" not in written
    for picture in pictures(job, made).values():
        assert not list(ElementTree.fromstring(picture).iter(f"{SVG}script"))
    assert "losses" in pictures(job, made)


def test_the_page_is_ascii_whatever_names_are() -> None:
    text = as_html(job_of(MODEL + PIPELINE, path="模型/größe.py"), None)
    assert text.isascii()
    assert "".join(Page(text).texts).count("模型/größe.py") >= 3


# ---- the pictures ----


def cells_of(drawn: str) -> dict[int, ElementTree.Element]:
    found = ElementTree.fromstring(drawn).iter(f"{SVG}g")
    return {int(each.get("data-rank", "")): each for each in found if each.get("class") == "rank"}


def test_each_rank_has_a_cell_within_its_node() -> None:
    drawn = ElementTree.fromstring(mesh.draw(Mesh(pipe=2, data=4, tensor=TensorMesh(y=2, mode="1d")), 4).standalone())
    nodes = [each for each in drawn.iter(f"{SVG}rect") if each.get("class") == "node"]
    assert len(nodes) == 4
    cells = cells_of(ElementTree.tostring(drawn, encoding="unicode"))
    assert list(cells) == list(range(16))
    for rank, cell in cells.items():
        inner = cell.find(f"{SVG}rect")
        assert inner is not None
        for at, size in (("x", "width"), ("y", "height")):
            low, high = (float(nodes[rank // 4].get(key, "")) for key in (at, size))
            assert low <= float(inner.get(at, "")) <= low + high - float(inner.get(size, ""))
    assert cells[11].get("aria-label") == "rank 11: pipe 1, data 1, tensor 1"
    tip = cells[11].find(f"{SVG}title")
    assert tip is not None
    assert (tip.text or "").splitlines()[1:] == ["pipe: [3, 11]", "data: [9, 11, 13, 15]", "tensor: [10, 11]"]
    assert [each.get("tabindex") for each in cells.values()] == ["0"] + ["-1"] * 15


@pytest.mark.parametrize(
    "made",
    [
        Mesh(pipe=2, data=2, tensor=TensorMesh(y=2, mode="1d")),
        Mesh(data=2, pipe=2, tensor=TensorMesh(d=2, q=2, y=2, mode="2.5d"), order=("data", "pipe", "tensor")),
    ],
)
def test_the_script_s_sizes_and_strides_give_the_mesh_s_groups(made: Mesh) -> None:
    (axes,) = (
        json.loads(each.get("data-axes", ""))
        for each in ElementTree.fromstring(mesh.draw(made, 8).standalone()).iter(f"{SVG}metadata")
    )
    assert list(axes) == mesh.axes_of(made)
    for axis, parts in axes.items():
        for rank in range(made.world_size):
            found = [rank]
            for size, stride in parts:
                index = rank // stride % size
                found = [each + (other - index) * stride for each in found for other in range(size)]
            assert tuple(found) == made.peers(rank, axis)


def test_axes_that_are_the_tensor_axis_itself_are_not_named_twice() -> None:
    one = Mesh(data=2, tensor=TensorMesh(y=4, mode="1d"))
    assert mesh.axes_of(one) == ["data", "tensor"]
    assert mesh.axes_of(Mesh(tensor=TensorMesh(q=2, y=2, mode="2d"))) == ["tensor", "x", "y"]
    assert [mesh.axis_name(one, axis) for axis in ("y", "data", "pipe")] == ["tensor", "data", "pipe"]
    cuboid = Mesh(tensor=TensorMesh(q=2, y=2, z=2, mode="3d"))
    assert [mesh.axis_name(cuboid, axis) for axis in ("q", "q y", "z", "q y z")] == ["x", "x y", "z", "tensor"]
    deep = Mesh(tensor=TensorMesh(d=2, q=2, y=2, mode="2.5d"))
    assert [mesh.axis_name(deep, axis) for axis in ("d", "q", "d q", "q y")] == ["d", "q", "x", "q y"]


@pytest.mark.parametrize(
    ("made", "count", "note"),
    [
        (Mesh(data=512), 512, ""),
        (Mesh(pipe=4, data=256), 4, "one replica is drawn, 4 of 1,024 ranks"),
        (Mesh(pipe=1024, tensor=TensorMesh(y=8, mode="1d")), 8, "one tensor group is drawn, 8 of 8,192 ranks"),
        (Mesh(tensor=TensorMesh(y=1024, mode="1d")), 512, "the first 512 of 1,024 ranks are drawn"),
    ],
)
def test_of_many_ranks_a_part_is_drawn_with_a_note(made: Mesh, count: int, note: str) -> None:
    picture = mesh.draw(made, 8)
    assert len(cells_of(picture.standalone())) == count
    assert note in picture.description
    assert mesh.drawn_ranks(made)[1] == note


def test_nodes_are_those_of_the_config_without_a_device() -> None:
    assert [mesh.node_size_of(world, None) for world in (64, 6, 1)] == [8, 6, 1]
    job = job_of(MODEL + PIPELINE + "cluster = dict(nodes_of=4)\n")
    assert "16 ranks in nodes of 4" in as_html(job, None)
    assert "16 ranks in nodes of 8" in as_html(job, forecast_of(job))


def test_stages_have_the_layers_and_the_work_of_the_job() -> None:
    job, _ = case("chunks")
    found = stages.stages_of(job)
    assert [each.rank for each in found] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [each.num_layers for each in found] == list(job.stages.counts or ())
    assert sum(each.load for each in found) == pytest.approx(len(found))
    assert found[-1].name == "stage 7: layer 7"
    assert [each.name for each in stages.stages_of(case("unknown model")[0])] == ["stage 0", "stage 1"]


@pytest.mark.parametrize("name", ["pipeline", "chunks"])
def test_the_page_s_schedule_is_that_of_show(name: str) -> None:
    job, _ = case(name)
    timeline = bubble.simulate_job(job)
    assert timeline is not None
    boxes = re.findall(
        r'<rect class="box"[^>]*><title>(\w) of stage (\d+), micro-batch (\d+)', pictures(job, None)["schedule"]
    )
    ordered = [(action.kind, str(action.stage), str(action.micro)) for order in timeline.orders for action in order]
    assert boxes == ordered
    numbers = re.compile(r'class="box" x="([\d.]+)" y="(\d+)" width="([\d.]+)"')
    assert numbers.findall(show.as_svg(job)) == numbers.findall(pictures(job, None)["schedule"])


def test_memory_s_bars_are_the_forecast_s_parts() -> None:
    made = forecast_of(job_of(LARGE + PIPELINE, 64), "a100-40g")
    device = made.machine.device
    drawn = ElementTree.fromstring(memory.draw(made.memory, device).standalone())
    bars = [each for each in drawn.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    assert len(bars) == 4 * len(memory.PARTS)
    widths = [float(each.get("width", "")) for each in bars]
    sizes = [getattr(stage, part) for stage in made.memory for part in memory.PARTS]
    scale = sum(widths) / sum(sizes)
    assert widths == pytest.approx([scale * size for size in sizes], abs=0.2)
    lines = [each for each in drawn.iter(f"{SVG}line") if each.get("class") in ("limit", "warning")]
    left = float(bars[0].get("x", ""))
    shares = [(float(each.get("x1", "")) - left) / scale / device.memory_bytes for each in lines]
    assert shares == pytest.approx([0.84, 0.92, 1.0], abs=1e-3)
    texts = "\n".join(drawn.itertext())
    assert made.verdict == "does not fit"
    assert f"{made.binding.total / GIB:.1f} GiB does not fit" in texts
    assert (
        f"stage {made.binding_rank} needs {made.binding.total / GIB:.1f} GiB, the most of all (a100-40g has 39.8"
        in texts
    )


def test_without_a_device_memory_has_no_limit() -> None:
    job, _ = case("no device")
    drawn = pictures(job, None)["memory"]
    assert "<line class=" in drawn
    assert 'class="limit"' not in drawn
    assert "No device is known" in as_html(job, None)


def test_traffic_tells_links_apart_by_more_than_colour() -> None:
    sent = (Sent("y", False, 3 * GIB), Sent("data", True, 1.5 * GIB), Sent("pipe", True, 0.0))
    made = Mesh(pipe=2, data=2, tensor=TensorMesh(y=2, mode="1d"))
    drawn = ElementTree.fromstring(traffic.draw(sent, made).standalone())
    bars = [each for each in drawn.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    assert [each.get("class") for each in bars] == ["within", "between", "between"]
    first, second, third = (float(each.get("width", "")) for each in bars)
    assert (second, third) == (pytest.approx(first / 2, abs=0.06), 0.0)
    assert len([each for each in drawn.iter(f"{SVG}rect") if each.get("fill") == "url(#traffic-hatch)"]) == 3
    assert list(traffic.rows(sent, made)) == [
        ("tensor", "within a node", "3.00 GiB"),
        ("data", "between nodes", "1.50 GiB"),
        ("pipe", "between nodes", "0 B"),
    ]


# ---- a run's losses ----


def test_losses_of_a_run_are_in_one_panel(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 5.0 - step} | ({"eval_loss": 4.5} if step == 2 else {}) for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    job = job_of(MODEL + PIPELINE + f"train = dict(output_dir={str(tmp_path)!r})\n")
    drawn = ElementTree.fromstring(pictures(job, None)["losses"])
    texts = list(drawn.itertext())
    assert {"training", "held-out", "loss"} <= set(texts)
    assert "Loss over steps; at the end training 1 after step 4, held-out 4.5 after step 2" in texts
    dashes = {each.get("stroke-dasharray") for each in drawn.iter(f"{SVG}line") if each.get("class") == "curve"}
    assert len(dashes) == 2
    assert 'id="losses"' in as_html(job, None)


@pytest.mark.parametrize("content", ["", "no record\n", '{"step": 1, "loss": null}\n'])
def test_a_run_without_losses_has_no_picture(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    job = job_of(MODEL + PIPELINE + f"train = dict(output_dir={str(tmp_path)!r})\n")
    assert "losses" not in pictures(job, None)
    assert ("1 line is not a record" in as_html(job, None)) == content.startswith("no record")


@pytest.mark.parametrize("folder", ["a" * 5000, "nowhere", "/dev/null/outputs"])
def test_a_folder_that_cannot_be_is_no_run(folder: str) -> None:
    job = job_of(MODEL + PIPELINE + f"train = dict(output_dir={folder!r})\n")
    assert "losses" not in pictures(job, None)


# ---- absurd sizes ----


def test_a_mesh_of_a_million_ranks_is_drawn_at_once() -> None:
    job = job_of(MODEL + PIPELINE, 1 << 20)
    began = time.process_time()
    assert "one replica is drawn, 8 of 1,048,576 ranks" in as_html(job, forecast_of(job))
    assert time.process_time() - began < 5


def test_a_pipeline_that_is_too_long_to_simulate_has_no_schedule() -> None:
    text = MODEL.replace("num_layers=8", "num_layers=400") + "parallel = dict(pipeline=400)\n"
    job = job_of(text + "batch = dict(accumulation=400)\n", 400)
    assert "schedule" not in pictures(job, None)
    page = as_html(job, forecast_of(job))
    assert "too long to be simulated and drawn" in page
    assert page.count("336 more ranks are in the table") == 2


def test_loads_of_experts_are_a_row_of_cells_per_layer(tmp_path: Path) -> None:
    job = job_of(MODEL + f"train = dict(output_dir={str(tmp_path)!r})\n", 1)
    assert 'id="experts"' not in as_html(job, None)
    expert_loads.write(
        tmp_path, 40, [LayerLoad("blocks.0", 1, (0.5, 0.5)), LayerLoad("blocks.1", 1, (1.0, 0.0), 0.125)]
    )
    cells = ElementTree.fromstring(pictures(job, None)["experts"]).findall(f"{SVG}rect[@class='load']")
    assert [cell.get("fill-opacity") for cell in cells] == ["0.500", "0.500", "1.000", "0.000"]
    assert "blocks.1, expert 0: 2.00 times the mean" in as_html(job, None)
    assert "12.5 %" in as_html(job, None)
    (tmp_path / EXPERTS).write_text("<b>no JSON")
    page = as_html(job, None)
    assert "experts.json cannot be read" in page
    assert "<b>" not in page
