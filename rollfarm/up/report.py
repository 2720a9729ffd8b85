"""curve.png and report.html: the run on one page that needs nothing beside it."""

import base64
import html
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollfarm.up.console import clock_text, number_text
from rollfarm.up.folder import resume_command
from rollfarm.up.summary import Summary

CURVE = "curve.png"
PAGE = "report.html"
LABEL = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
SMOOTHING = 0.3
"""Weight of the newest step in the smoothed curve."""

INK, ACCENT, SECOND, PALE = "#1f2933", "#0e7c86", "#d9822b", "#c9d3dc"


def write(summary: Summary, run: Path) -> None:
    """Write both files into the run's folder."""
    draw(summary, run / CURVE)
    config = run / "config.toml"
    text = page(summary, (run / CURVE).read_bytes(), config.read_text() if config.exists() else "")
    (run / PAGE).write_text(text)


def draw(summary: Summary, path: Path) -> None:
    """The reward of each step, smoothed, and the validations over it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.edgecolor": PALE, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=120, layout="constrained")
    steps = range(1, len(summary.rewards) + 1)
    axes.plot(steps, summary.rewards, color=ACCENT, alpha=0.25, linewidth=1.2)
    axes.plot(steps, smooth(summary.rewards), color=ACCENT, linewidth=2.4, label="training reward, mean of the batch")
    points = [(item["step"], item[summary.metric]) for item in summary.validations if summary.metric in item]
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=SECOND,
            marker="o",
            markersize=7,
            linewidth=1.4,
            linestyle="--",
            label=f"validation {summary.metric}",
        )
        for step, value in (points[0], points[-1]):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                color=SECOND,
                bbox=LABEL,
            )
    axes.set_xlabel("step")
    axes.margins(x=0.03, y=0.14)
    axes.grid(axis="y", color=PALE, alpha=0.5, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    if summary.rewards or points:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.14), ncols=2, borderaxespad=0)
    figure.savefig(path)
    pyplot.close(figure)


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average that starts at the first value."""
    result: list[float] = []
    for value in values:
        result.append(value if not result else result[-1] + SMOOTHING * (value - result[-1]))
    return result


def page(summary: Summary, curve: bytes, config: str) -> str:
    """The report as HTML."""
    name = _run_name(config) or Path(summary.run).name
    picture = base64.b64encode(curve).decode()
    resume = f"; go on with <code>{_e(resume_command(Path(summary.run)))}</code>"
    verdict = summary.ending + ("" if summary.finished else resume)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{_e(name)} · rollfarm</title><style>{STYLE}</style></head><body><main>
<header><p class="brand">rollfarm</p><h1>{_e(name)}</h1>
<p class="quiet">{verdict} · <code>{_e(summary.run)}</code></p></header>
<section class="cards">{"".join(_card(*card) for card in _cards(summary))}</section>
<section><h2>Reward</h2><img alt="reward by step" src="data:image/png;base64,{picture}"></section>
<section><h2>Where the trainer's time went</h2>{_bar(summary)}</section>
<section class="columns">
<div><h2>Staleness</h2>{_table(("versions behind", "samples"), summary.staleness.items())}</div>
<div><h2>Episodes</h2>{_table(("outcome", "episodes"), _outcomes(summary))}</div>
<div><h2>Groups dropped</h2>{_table(("reason", "groups"), summary.dropped_groups.items())}</div>
</section>
<section><h2>Validations</h2>{_validations(summary)}</section>
<section><h2>Configuration as used</h2>
<details><summary>config.toml</summary><pre>{_e(config)}</pre></details></section>
</main></body></html>
"""


def _cards(summary: Summary) -> Iterable[tuple[str, str, str]]:
    gain = "" if summary.gain is None else f"{summary.gain:+.3f}"
    yield f"{summary.metric} before", _number(summary.reward_before), "first validation"
    yield f"{summary.metric} after", _number(summary.reward_after), gain
    yield "steps", str(summary.steps), f"policy version {summary.policy_version}"
    yield "samples", str(summary.samples), f"at most {summary.max_staleness} versions old"
    yield "tokens", number_text(summary.tokens), f"{number_text(summary.tokens_per_s)} a second"
    restarts = {0: "no restarts", 1: "1 restart"}.get(summary.restarts, f"{summary.restarts} restarts")
    yield "time", clock_text(summary.wall_s), restarts + (", resumed" if summary.resumed else "")


def _card(name: str, value: str, note: str) -> str:
    quiet = f'<p class="quiet">{_e(note) or "&nbsp;"}</p>'
    return f'<div class="card"><p>{_e(name)}</p><strong>{_e(value)}</strong>{quiet}</div>'


def _bar(summary: Summary) -> str:
    parts = (
        ("waiting for samples", summary.waiting_s, "wait"),
        ("training", summary.training_s, "train"),
        ("publishing weights", summary.publishing_s, "publish"),
    )
    whole = sum(seconds for _, seconds, _ in parts)
    if not whole:
        return '<p class="quiet">No step was taken.</p>'
    spans = "".join(
        f'<span class="{kind}" style="width:{100 * seconds / whole:.2f}%"></span>' for _, seconds, kind in parts
    )
    legend = "".join(
        f'<li><i class="{kind}"></i>{name} <b>{seconds:.1f} s</b> ({seconds / whole:.0%})</li>'
        for name, seconds, kind in parts
    )
    return f'<div class="bar">{spans}</div><ul class="legend">{legend}</ul>'


def _outcomes(summary: Summary) -> list[tuple[str, int]]:
    most_first = sorted(summary.outcomes.items(), key=lambda item: -item[1])
    return [(name.removeprefix("OUTCOME_").lower(), count) for name, count in most_first]


def _validations(summary: Summary) -> str:
    names = list(dict.fromkeys(name for item in summary.validations for name in item))
    rows = [[_number(item.get(name)) for name in names] for item in summary.validations]
    return _table(names, rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{_e(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return '<p class="quiet">None.</p>'
    return "<table><tr>" + "".join(f"<th>{_e(name)}</th>" for name in head) + f"</tr>{body}</table>"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _run_name(config: str) -> str:
    return tomllib.loads(config).get("run", {}).get("name", "")


def _e(text: str) -> str:
    return html.escape(text)


STYLE = """
:root{--ink:#1f2933;--quiet:#66788a;--line:#e3e9ee;--page:#f6f8fa;--card:#fff;--accent:#0e7c86}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink)}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:36px 20px 64px}
h1{margin:0;font-size:30px;letter-spacing:-.01em}
h2{margin:0 0 12px;font-size:16px}
p{margin:0}
.brand{color:var(--accent);font-weight:600;letter-spacing:.04em}
.quiet{color:var(--quiet);font-size:13px}
code,pre{font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
section{margin-top:20px;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px}
section.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;background:none;border:0;padding:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 16px}
.card strong{display:block;font-size:25px;font-variant-numeric:tabular-nums}
.card p:first-child{color:var(--quiet);font-size:13px}
section.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:28px}
img{display:block;width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--quiet);font-weight:500;font-size:13px}
td,th{padding:5px 8px 5px 0;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
td:not(:first-child),th:not(:first-child){text-align:right}
.bar{display:flex;height:16px;border-radius:8px;overflow:hidden;background:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:4px 24px;margin:12px 0 0;padding:0;list-style:none}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
.wait{background:#c9d3dc}.train{background:#0e7c86}.publish{background:#d9822b}
summary{cursor:pointer}
pre{overflow-x:auto;margin:12px 0 0}
"""
