"""The transcript as a page: every token coloured by its origin, and what its cycle was on hovering."""

from __future__ import annotations

import html

import numpy as np

from specjax import metrics
from specjax.evaluation.transcript import Origin, Place, places
from specjax.models.tokenizer import token_texts
from specjax.types import DecodeResult

MEANING = {
    Origin.ACCEPTED: "drafted, and kept",
    Origin.CORRECTED: "the target's own, in place of a rejected draft",
    Origin.BONUS: "the target's own, after a draft that was accepted whole",
    Origin.UNDRAFTED: "the target's own, in a cycle without a draft",
}

# Nothing is fetched and nothing runs. What the style adds (↵, …) is no part of the text.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --paper: #fff; --ink: #1a1a1a; --faint: #6a6a6a; --line: #b4b4b4;
  --accepted: #cfeed6; --corrected: #ffd0cc; --bonus: #cfe0ff;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #161616; --ink: #e8e8e8; --faint: #9a9a9a; --line: #5c5c5c;
    --accepted: #1d4d2b; --corrected: #7a2a26; --bonus: #234a8a;
  }}
}}
body {{
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink); font: 16px/1.7 system-ui, sans-serif;
}}
h1 {{ font-size: 1.3rem; }}
h2 {{ font-size: 1rem; margin: 2.5rem 0 .5rem; }}
.figures, .legend {{ color: var(--faint); font-size: .9rem; margin: .5rem 0; }}
.legend span {{ color: var(--ink); padding: 0 .3em; }}
.prompt, .answer {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.prompt {{
  color: var(--faint); font-size: .9rem; line-height: 1.4; max-height: 15rem; overflow: auto;
  border-left: 3px solid var(--line); padding-left: .8rem;
}}
.accepted {{ background: var(--accepted); }}
.corrected {{ background: var(--corrected); font-weight: 600; }}
.bonus {{ background: var(--bonus); font-weight: 600; }}
.answer span {{ padding: .15em 0; }}
.answer span:hover {{ outline: 2px solid var(--ink); }}
.answer .cycle {{ border-left: 1px solid var(--line); }}
.answer .newline::before {{ content: "↵"; color: var(--faint); font-weight: normal; }}
.answer .part::before {{ content: "…"; color: var(--faint); font-weight: normal; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="figures">{figures}</p>
<p class="legend">{legend}</p>
{sections}
</body>
</html>
"""
SECTION = """\
<section>
<h2>Prompt {number}</h2>
<div class="prompt" dir="auto">{prompt}</div>
<p class="figures">{figures}</p>
<div class="answer" dir="auto">{answer}</div>
</section>"""


def html_transcript(result: DecodeResult, *, title: str = "specjax") -> str:
    """All rows of a result as one HTML page that stands by itself.

    Args:
      result: from `specjax.decode`; several of one drafter as `DecodeResult.pooled` has them.
      title: of the page.

    Returns:
      The page. The text of each element of the class `answer` is that of its tokens, special ones
      included, and each of its spans is a token.

    Raises:
      ValueError: the target has no tokenizer.
    """
    if result.tokenizer is None:
        raise ValueError("a transcript needs a tokenizer; this target has none")
    rows = range(len(result.tokens))
    return PAGE.format(
        title=_escaped(title),
        figures=_escaped(_figures(result, list(rows))),
        legend=_legend(drafted=bool(result.num_draft_tokens)),
        sections="\n".join(_section(result, row) for row in rows),
    )


def _section(result: DecodeResult, row: int) -> str:
    tokens = result.tokens[row]
    pieces = token_texts(result.tokenizer, tokens)
    told = zip(tokens.tolist(), pieces, places(result, row), strict=True)
    bounded = bool(result.num_draft_tokens)  # in plain decoding every token is a cycle
    figures = f"{_figures(result, [row])} · ended by {result.stop_reason[row].name}"
    return SECTION.format(
        number=row + 1,
        prompt=_escaped(result.tokenizer.decode(result.prompts[row])),
        figures=_escaped(figures),
        answer="".join(_span(token, piece, place, bounded) for token, piece, place in told),
    )


def _span(token: int, piece: str, place: Place, bounded: bool) -> str:
    """A token. One without a text holds the first bytes of a character that a later one completes."""
    classes = [place.origin.name.lower()]
    if bounded and place.draft == 1:
        classes.append("cycle")
    if not piece:
        classes.append("part")
    elif piece.isspace() and "\n" in piece:
        classes.append("newline")
    tip = _escaped(_tip(token, place)).replace("\n", "&#10;")
    return f'<span class="{" ".join(classes)}" title="{tip}">{_escaped(piece)}</span>'


def _tip(token: int, place: Place) -> str:
    where = {
        Origin.ACCEPTED: f", draft {place.draft}",
        Origin.CORRECTED: f", in place of draft {place.draft}",
        Origin.BONUS: f", after draft {place.accepted}",
        Origin.UNDRAFTED: "",
    }
    lines = [f"{place.origin.name.lower()}{where[place.origin]}"]
    lines.append(f"cycle {place.cycle}: {place.accepted} of {place.drafted} accepted")
    if place.confidence is not None:
        whose = "" if place.origin is Origin.ACCEPTED else " of the rejected draft"
        lines.append(f"confidence{whose} {place.confidence:.2f}")
    return "\n".join([*lines, f"token {token}"])


def _figures(result: DecodeResult, rows: list[int]) -> str:
    """τ, α_k and their base, of some rows; those of plain decoding have no α_k."""
    columns = result.accepted, result.drafted, result.committed
    accepted, drafted, committed = (
        np.concatenate([column[row] for row in rows]) for column in columns
    )
    tokens, passes = committed.sum(), metrics.target_passes(committed)
    said = f"τ {_number(metrics.tau(committed))}: {tokens} tokens in {passes} target passes"
    rates = metrics.alpha(accepted, drafted, committed, result.draft_depth)
    return f"{said} · α_k {' '.join(map(_number, rates))}" if len(rates) else said


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def _legend(*, drafted: bool) -> str:
    shown = Origin if drafted else [Origin.UNDRAFTED]
    names = {origin: origin.name.lower() for origin in shown}
    told = [
        f'<span class="{name}">{name}</span> {_escaped(MEANING[origin])}'
        for origin, name in names.items()
    ]
    if drafted:
        told.append("A thin line begins a cycle. Every token tells more on hovering.")
    return "<br>\n".join(told)


def _escaped(text: str) -> str:
    return html.escape(text).replace("\r", "&#13;")  # else a parser reads it as \n
