"""Page of `dslpar show --format html`: a job in pictures, as one self-contained HTML file.

    Path("page.html").write_text(as_html(job, forecast))
    for name, svg in pictures(job, forecast).items():
        Path(f"{name}.svg").write_text(svg)

`job` is the resolved config, and `forecast` its forecast or None. The page consists of static SVGs and tables, so it
can be read and printed without its script. The script marks the groups of the rank under the pointer, and switches
between light and dark. Paths and names come from users and are escaped. As a second protection, the page's content
security policy (https://www.w3.org/TR/CSP3) allows only the page's own style and script, by their hashes, and no
requests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from dslpar.forecast.device import GIB
from dslpar.forecast.plan import AT_FULL_SPEED, COMFORTABLE, FULL, Forecast
from dslpar.layout.resolve import Job
from dslpar.planner import show
from dslpar.planner.pictures import experts, losses, memory, mesh, stages, traffic
from dslpar.reporting import expert_loads
from dslpar.reporting.curves import Panel
from dslpar.reporting.picture import Picture, scheme, shown, style
from dslpar.reporting.run_dir import EXPERTS


class _Section(NamedTuple):
    """A section of the page."""

    name: str
    """Its anchor: `#mesh`."""
    title: str
    lead: str
    """One sentence about the picture, as HTML."""
    picture: Picture | None
    table: str = ""
    """The picture's numbers, as HTML."""
    controls: str = ""
    """Buttons, as HTML."""


def as_html(job: Job, made: Forecast | None) -> str:
    """Return the page as HTML; `made` is the forecast, or None if the machine or the model's costs are unknown."""
    sections = list(_sections(job, made))
    css = style() + scheme(":root[data-theme=light]", "light") + scheme(":root[data-theme=dark]", "dark")
    css += _file("page.css")
    script = _file("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(script)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<li><a href="#{each.name}">{each.title}</a></li>' for each in sections)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{shown(job.path)}: {job.mesh.world_size:,} ranks</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{css}</style>",
        "</head>",
        "<body>",
        "<header>",
        f'<div class="top"><h1>{shown(job.path)}</h1><button type="button" id="theme" hidden>Dark</button></div>',
        f"<dl>{''.join(_facts(job, made))}</dl>",
        "</header>",
        f'<nav aria-label="Pictures"><ul>{links}</ul></nav>',
        "<main>",
        *(_html(each) for each in sections),
        "</main>",
        "<footer>This page shows what dslpar knows before a run. <code>dslpar show</code> prints the same as text. "
        "<code>dslpar plan</code> looks for better layouts.</footer>",
        f"<script>{script}</script>",
        "</body>",
        "</html>",
    ]
    # Write other characters as references: ASCII stays the same whatever encoding a terminal or pipe uses.
    return ("\n".join(parts) + "\n").encode("ascii", "xmlcharrefreplace").decode("ascii")


def pictures(job: Job, made: Forecast | None) -> dict[str, str]:
    """Return the texts of the pictures' SVG files, by name."""
    drawn = (each.picture for each in _sections(job, made))
    return {picture.name: picture.standalone() for picture in drawn if picture is not None}


def _file(name: str) -> str:
    return resources.files("dslpar.planner").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_SHARES = (
    f"Up to {100 * COMFORTABLE:.0f} % of the device's memory a step fits; up to {100 * FULL:.0f} % it is tight, and "
    f"above {100 * AT_FULL_SPEED:.0f} % it thrashes."
)
_NO_DEVICE = "No device is known; <code>cluster.device=h100-80g</code> names one."

# The head ----------------------------------------------------------------------------------------------------------


def _facts(job: Job, made: Forecast | None) -> Iterator[str]:
    sizes, batch = job.mesh, job.batch
    cuboid = sizes.tensor
    mode = f" ({cuboid.mode}: x {cuboid.x}, y {cuboid.y}, z {cuboid.z})" if cuboid.mode else ""
    yield _fact("ranks", f"{sizes.world_size:,}", f"order {', '.join(sizes.order)}, slow to fast")
    yield _fact(
        "layout", f"pipe {sizes.pipe}, data {sizes.data}, tensor {cuboid.size}", f"ZeRO {job.spec.zero.stage}{mode}"
    )
    product = f"micro {batch.micro_size} * accumulation {batch.accumulation} * data {sizes.data}"
    yield _fact("batch", f"{batch.global_size:,} samples", product)
    if made is None:
        return
    needs, device = made.binding.total, made.machine.device
    css = "bad" if made.verdict == "does not fit" else ""
    of = f"stage {made.binding_rank} needs {needs / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB, {device.name}"
    yield _fact("memory", made.verdict, of, css)
    speed = f"{made.tokens_per_s_gpu:,.0f} tokens per second and device, MFU {100 * made.mfu_causal:.1f} %"
    half, most = (f"{100 * share:.0f} %" for share in (made.error.half, made.error.nine_of_ten))
    speed += f"; +- {half} in half of the cases, {most} in nine of ten"
    yield _fact("step, forecast", _seconds(made.time.step_s), speed)


def _fact(name: str, value: str, more: str, css: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f"<div><dt>{shown(name)}</dt><dd{css}>{shown(value)}<span>{shown(more)}</span></dd></div>"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


# Sections ----------------------------------------------------------------------------------------------------------


def _sections(job: Job, made: Forecast | None) -> Iterator[_Section]:
    yield _mesh(job, made)
    yield _stages(job)
    if job.mesh.pipe > 1:
        yield _schedule(job)
    yield _memory(job, made)
    yield _traffic(job, made)
    found, problems = losses.read(Path(job.output_dir))
    if found is not None or problems:
        yield _losses(job.output_dir, found, problems)
    if (section := _experts(job.output_dir)) is not None:
        yield section


def _mesh(job: Job, made: Forecast | None) -> _Section:
    per_node = made.machine.nodes.per_node if made is not None else job.spec.cluster.nodes_of
    per_node = mesh.node_size_of(job.mesh.world_size, per_node)
    axes = mesh.axes_of(job.mesh)
    buttons = "".join(
        f'<button type="button" data-axis="{axis}" aria-pressed="{str(axis == axes[0]).lower()}">'
        f"{axis} {job.mesh.size(axis)}</button>"
        for axis in axes
    )
    controls = (
        f'<div class="controls" id="mesh-controls" role="group" aria-label="Axis" hidden>{buttons}</div>'
        '<p id="mesh-told" role="status">Point at a rank, or move to it with Tab and the arrow keys, to see its group '
        "on an axis. Click to keep it marked.</p>"
    )
    lead = f"{job.mesh.world_size:,} ranks in nodes of {per_node}; order {', '.join(job.mesh.order)}, slow to fast."
    table = _table("Groups", ("axis", "ranks", "groups", "the first ones"), mesh.group_rows(job.mesh))
    return _Section(
        "mesh", "Mesh", shown(lead), mesh.draw(job.mesh, per_node), table if axes else "", controls if axes else ""
    )


def _stages(job: Job) -> _Section:
    lead = "The compute of each pipeline rank in a forward, relative to the mean."
    if job.stages.counts is None:
        lead += " Its layers are unknown before the model is built; all stages are drawn alike."
    rows = (
        (
            f"{each.rank}",
            f"{each.number}",
            each.layers,
            "" if each.num_layers is None else f"{each.num_layers}",
            f"{each.load:.3f}",
        )
        for each in stages.stages_of(job)
    )
    table = _table("Stages", ("pipe", "stage", "layers", "number", "work"), rows)
    return _Section("stages", "Stages", lead, stages.draw(job), table)


def _schedule(job: Job) -> _Section:
    lead = "The simulated actions of each pipeline rank in a step; runs follow the same order."
    picture = show.schedule_picture(job)
    if picture is None:
        lead = f"The step of {job.mesh.pipe:,} ranks is too long to be simulated and drawn."
    rows = ((f"{rank}", f"{round(job.schedule.held(rank).total, 2):g}") for rank in range(job.mesh.pipe))
    table = _table("Activations", ("pipe", "micro-batches held at most"), rows)
    return _Section("schedule", "Schedule", lead, picture, table)


def _memory(job: Job, made: Forecast | None) -> _Section:
    found = show.memory_of(job, made)
    if found is None:
        return _Section("memory", "Memory", "The memory of this model's layers is unknown.", None)
    device = made.machine.device if made is not None else None
    lead = "The memory of a rank of each stage at its fullest moment: model and optimizer blue, activations orange. "
    lead += _SHARES if device is not None else _NO_DEVICE
    head = ("pipe", *memory.PARTS.values(), "sum, GiB", *(("of the device", "verdict") if device is not None else ()))
    table = _table("Memory in GiB", head, memory.rows(found, device))
    return _Section("memory", "Memory", lead, memory.draw(found, device), table)


def _traffic(job: Job, made: Forecast | None) -> _Section:
    if made is None:
        is_known = show.memory_of(job, made) is not None
        why = _NO_DEVICE if is_known else "The traffic of this model's layers is unknown."
        return _Section("traffic", "Traffic", why, None)
    sent = made.time.sent
    if not sent:
        return _Section("traffic", "Traffic", "Ranks send nothing.", None)
    lead = f"Bytes that a rank sends in a step, within its node of {made.machine.nodes.per_node} and between nodes."
    table = _table("Traffic", ("axis", "link", "bytes per step"), traffic.rows(sent, job.mesh))
    return _Section("traffic", "Traffic", lead, traffic.draw(sent, job.mesh), table)


def _losses(folder: str, found: Panel | None, problems: Sequence[str]) -> _Section:
    lead = " ".join([f"From the run in <code>{shown(folder)}</code>.", *map(shown, problems)])
    if found is None:
        return _Section("losses", "Losses", lead, None)
    table = _table("Losses", ("loss", "values", "first", "lowest", "last", "after step"), losses.rows(found))
    return _Section("losses", "Losses", lead, losses.draw(found), table)


def _experts(folder: str) -> _Section | None:
    lead = f"The load of the experts that the run in <code>{shown(folder)}</code> measured last."
    try:
        measured = expert_loads.read(Path(folder))
    except (OSError, ValueError) as error:
        return _Section("experts", "Experts", f"{lead} {EXPERTS} cannot be read: {shown(error)}.", None)
    if measured is None or not measured[1]:
        return None
    step, loads = measured
    head = ("layer", "experts", "per token", "most over mean", "effective", "fullest", "emptiest", "dropped")
    table = _table("Experts", head, experts.rows(loads))
    return _Section("experts", "Experts", lead, experts.draw(step, loads), table)


# HTML --------------------------------------------------------------------------------------------------------------


def _html(section: _Section) -> str:
    name = section.name
    parts = [
        f'<section id="{name}" aria-labelledby="{name}-heading">',
        f'<h2 id="{name}-heading">{section.title}</h2>',
        f'<p class="soft">{section.lead}</p>',
        section.controls,
        f'<div class="scroll">{section.picture.inline()}</div>' if section.picture is not None else "",
        f"<details><summary>in numbers</summary>{section.table}</details>" if section.table else "",
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = list(zip(head, *rows, strict=True))
    css = [' class="number"' if _are_numbers(column[1:]) else "" for column in columns]
    titles = "".join(f'<th scope="col"{css[at]}>{shown(title)}</th>' for at, title in enumerate(head))
    body = "".join(
        f"<tr>{''.join(f'<td{css[at]}>{shown(cell)}</td>' for at, cell in enumerate(row))}</tr>"
        for row in zip(*(column[1:] for column in columns), strict=True)
    )
    return (
        f'<div class="scroll"><table><caption>{shown(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _are_numbers(cells: Iterable[str]) -> bool:
    return all(cell.replace(",", "").replace(".", "").replace(" %", "").isdecimal() for cell in cells if cell)
