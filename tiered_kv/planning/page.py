"""A plan as one page of HTML: nothing is loaded from elsewhere, nothing in it is a script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tiered_kv.config import readable_bytes
from tiered_kv.planning.figures import RATED_YEARS, Figures
from tiered_kv.planning.plan import Plan
from tiered_kv.planning.plots import Line, chart
from tiered_kv.planning.recommend import lifetime

__all__ = ["page"]

_STYLE = """
body { font-family: system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
  max-width: 980px; padding: 24px 20px 60px; line-height: 1.5; }
h1 { font-size: 1.6em; margin: 0 0 .2em; }
h2 { font-size: 1.15em; margin: 2em 0 .3em; }
p { margin: .4em 0; }
.lead { color: #555; }
.advice { background: #fff8e6; border-left: 5px solid #e69f00; padding: 12px 18px;
  margin: 1.2em 0; }
.advice strong { font-size: 1.08em; }
.advice ul { margin: .5em 0 0; padding-left: 1.2em; }
.facts { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 1.2em 0; }
.facts div { border: 1px solid #ddd; border-radius: 6px; padding: 8px 12px; }
.facts b { display: block; font-size: 1.35em; }
.facts span { color: #555; font-size: .86em; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: .88em; color: #333; }
.legend svg { vertical-align: -2px; }
svg { max-width: 100%; }
table { border-collapse: collapse; font-size: .86em; width: 100%; margin: .6em 0; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr.chosen td { background: #fff3d6; font-weight: 600; }
tr.first td { border-top: 2px solid #bbb; }
th { white-space: normal; } td { white-space: nowrap; } td.over { color: #b3261e; }
pre { background: #f6f6f6; padding: 10px 14px; overflow-x: auto; font-size: .9em; }
.small { color: #555; font-size: .9em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: .92em; }
dt { color: #555; } dd { margin: 0; }
"""


def page(plan: Plan, deployment: str) -> str:
    """The page as text; `deployment` is the recommended configuration."""
    question = plan.question
    body = [
        "<h1>What an SSD tier would buy</h1>",
        f'<p class="lead">{escape(_asked(plan))}</p>',
        _advice(plan),
        _facts(plan),
        *_charts(plan),
        "<h2>All figures</h2>",
        _table(plan),
        "<h2>The recommended configuration</h2>",
        '<p class="small">Adjust the path, then try it with <code>tiered-kv check</code>.</p>',
        f"<pre>{escape(deployment)}</pre>",
        "<h2>What this is made from</h2>",
        _sources(plan),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>",
    ]
    title = f"tiered-kv plan: {escape(question.trace.source)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _asked(plan: Plan) -> str:
    question, trace = plan.question, plan.question.trace
    hosts = " or ".join(f"{_size(size)} of" if size else "no" for size in question.host_bytes)
    sizes = " to ".join(dict.fromkeys(map(_size, (question.ssd_bytes[0], question.ssd_bytes[-1]))))
    return (
        f"{len(trace.requests):,} requests over {_duration(trace.seconds)} were replayed on "
        f"{sizes} of SSD behind {hosts} host memory, with {len(question.policies)} eviction "
        f"{'policy' if len(question.policies) == 1 else 'policies'}. A prompt's tokens whose KV is "
        "found in a tier are loaded in place of being computed by the GPU, where that is sooner."
    )


def _advice(plan: Plan) -> str:
    advice = plan.recommendation
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in advice.reasons)
    return f'<div class="advice"><strong>{escape(advice.headline)}</strong><ul>{reasons}</ul></div>'


def _facts(plan: Plan) -> str:
    chosen = plan.recommendation.figures
    token = chosen.first_token
    facts = [
        (f"{chosen.hits:.1%}", "of tokens found in the tiers"),
        ("–" if token is None else f"{token.mean:.2f} s", "mean time to the first token"),
        (
            "–" if chosen.saved_gpu_seconds is None else f"{chosen.saved_gpu_seconds:.2f}",
            "GPU engines saved"
            + (
                ""
                if chosen.gpu_seconds is None or chosen.saved_gpu_seconds is None
                else f" of {chosen.gpu_seconds + chosen.saved_gpu_seconds:.2f}"
            ),
        ),
        (
            "–" if chosen.ssd_bytes_per_day is None else _size(int(chosen.ssd_bytes_per_day)),
            "written to the SSD per day",
        ),
    ]
    return (
        '<div class="facts">'
        + "".join(f"<div><b>{escape(value)}</b><span>{what}</span></div>" for value, what in facts)
        + "</div>"
    )


def _charts(plan: Plan) -> list[str]:
    question, chosen = plan.question, plan.recommendation.figures.cell
    sizes = question.ssd_bytes
    columns = [_size(size) for size in sizes]
    marked = sizes.index(chosen.ssd_bytes) if chosen.ssd_bytes in sizes else None
    axis = "capacity of the SSD"
    hits: list[Line] = []
    wear: list[Line] = []
    for policy in question.policies:
        rows = plan.of(policy, chosen.host_bytes)[1:]
        hits.append(Line(policy, [one.hits for one in rows]))
        wear.append(Line(policy, [one.ssd_drive_writes or None for one in rows]))
    rows = plan.of(chosen.policy, chosen.host_bytes)
    bare, rest = rows[0], rows[1:]
    count = len(sizes)
    hits.append(Line(f"{chosen.policy}, no SSD", [bare.hits] * count, dashed=True))
    parts = [
        "<h2>Hit rate against capacity</h2>",
        (
            "<p>Share of all prompts' tokens whose KV is found "
            + (f"in {_size(chosen.host_bytes)} of host memory or " if chosen.host_bytes else "")
            + "on the SSD.</p>"
        ),
        chart("Hit rate", columns, hits, axis=axis, shown=_percent, marked=marked),
    ]
    tokens = [one.first_token for one in rest if one.first_token is not None]
    if bare.first_token is not None:
        before = bare.first_token
        then = plan.recommendation.figures.first_token or before
        times = [
            Line("mean", [token.mean for token in tokens]),
            Line("median", [token.p50 for token in tokens]),
            Line("mean without an SSD", [before.mean] * count, dashed=True),
            Line("median without an SSD", [before.p50] * count, dashed=True),
        ]
        parts += [
            "<h2>Time to the first token</h2>",
            (
                f"<p>With the policy {escape(chosen.policy)}, of requests that are served at once: "
                "loading what is found, then computing the rest. The 99th percentile, of the "
                f"longest prompts with the least found, goes from {_secs(before.p99)} without an "
                f"SSD to {_secs(then.p99)} with what is recommended.</p>"
            ),
            chart("Time to the first token", columns, times, axis=axis, shown=_secs, marked=marked),
        ]
    if any(value is not None for line in wear for value in line.values):
        rated = question.drive.rated_dwpd
        wear.append(Line(f"rated ({rated:g} per day)", [rated] * count, dashed=True))
        parts += [
            "<h2>SSD wear</h2>",
            (
                "<p>How many times a day the whole SSD would be written (each line of the grid is "
                "ten times the one below). Above the dashed line a drive of this size and rating "
                f"wears out in less than {RATED_YEARS:g} years; a larger drive, a better rated "
                "one, or a write budget helps.</p>"
            ),
            chart(
                "Drive writes per day",
                columns,
                wear,
                axis=axis,
                shown=_plain,
                marked=marked,
                decades=True,
            ),
        ]
    return parts


_HEADINGS = (
    *("policy", "host", "SSD", "found in host", "found on SSD", "TTFT mean", "p50", "p99"),
    *("GPU engines saved", "written per day", "drive writes per day", "lasts"),
)


def _table(plan: Plan) -> str:
    drive = plan.question.drive
    rows: list[str] = []
    before: tuple[str, int] | None = None
    for one in plan.figures:
        group = (one.cell.policy, one.cell.host_bytes)
        classes = []
        if one is plan.recommendation.figures:
            classes.append("chosen")
        if before is not None and group != before:
            classes.append("first")
        before = group
        over = (one.ssd_drive_writes or 0) > drive.rated_dwpd
        cells = _row(one, one.years(drive))
        text = "".join(
            f'<td class="over">{escape(cell)}</td>'
            if over and place >= len(cells) - 2
            else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(cells)
        )
        rows.append(
            f'<tr class="{" ".join(classes)}">{text}</tr>' if classes else f"<tr>{text}</tr>"
        )
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(one: Figures, years: float | None) -> list[str]:
    token = one.first_token
    times = ("–",) * 3 if token is None else tuple(map(_secs, (token.mean, token.p50, token.p99)))
    per_day, writes = one.ssd_bytes_per_day, one.ssd_drive_writes
    return [
        one.cell.policy,
        _size(one.cell.host_bytes),
        _size(one.cell.ssd_bytes),
        f"{one.host_hits:.1%}",
        f"{one.ssd_hits:.1%}",
        *times,
        "–" if one.saved_gpu_seconds is None else f"{one.saved_gpu_seconds:.2f}",
        "–" if per_day is None else _size(int(per_day)),
        "–" if writes is None else _plain(writes),
        "–" if years is None else lifetime(years),
    ]


def _sources(plan: Plan) -> str:
    question = plan.question
    trace, shape, speeds = question.trace, question.shape, question.speeds
    block = (
        ""
        if question.block_tokens is None
        else (
            f"; a block of {question.block_tokens} tokens has "
            f"{_size(int(shape.bytes_per_token * question.block_tokens))}"
        )
    )
    facts: Sequence[tuple[str, str]] = (
        (
            "Trace",
            (
                f"{trace.source} ({trace.kind.value}): {len(trace.requests):,} requests, "
                f"{trace.tokens:,} tokens, {_duration(trace.seconds)}; holding all of it would "
                f"take {_size(int(question.footprint_bytes))}"
            ),
        ),
        ("KV of a token", f"{_size(int(shape.bytes_per_token))} over {shape.ranks} rank(s){block}"),
        ("Known from", shape.source),
        ("Prefill", f"{speeds.prefill:,.0f} tokens/s ({speeds.prefill_from})"),
        (
            "Host memory loads",
            (
                f"{speeds.host.bytes_per_second / 1e9:.2f} GB/s = "
                f"{speeds.host.bytes_per_second / shape.bytes_per_token:,.0f} tokens/s "
                f"({speeds.host_from})"
            ),
        ),
        (
            "SSD loads",
            (
                f"{speeds.ssd.bytes_per_second / 1e9:.2f} GB/s = "
                f"{speeds.ssd.bytes_per_second / shape.bytes_per_token:,.0f} tokens/s "
                f"({speeds.ssd_from})"
            ),
        ),
        (
            "SSD rating",
            (
                f"{question.drive.rated_dwpd:g} drive writes per day for {RATED_YEARS:g} years "
                f"({question.drive.rated_from})"
            ),
        ),
    )
    return (
        "<dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
        + "</dl>"
    )


def _size(size: int) -> str:
    if not size:
        return "none"
    text = readable_bytes(size)
    number = text.rstrip("KMGTPiB")
    return f"{number} {text[len(number) :]}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace(".0%", "%")


def _secs(value: float) -> str:
    return f"{value:.2f} s" if value < 100 and value != int(value) else f"{value:.0f} s"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
