"""A worked design: questions about sections of a 200 000-token document, and what each part of the pattern is for."""

from dataclasses import dataclass, replace

from sparsefinder.cost.footprint import Footprint, footprint, full_footprint
from sparsefinder.cost.price import Price, attention_price, prediction_price
from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import Fixed, GlobalTokens, Window


@dataclass(frozen=True)
class LongDocument:
    """Sizes of the design. The question comes first, then the document.

    question: tokens of the question, global, so that they read every section in one hop and every token reads them.
    radius: of the window, for the wording around each token.
    section: tokens of a section; its last token is a summary that all tokens read (`Fixed`). A last section that is
        cut short would have none, so `tokens` must be a multiple of it.
    retrieved: keys that every tile of queries reads besides, predicted from content, wherever they are.
    rank, clusters: of the predictor (inverted lists). dim: of a head.
    """

    tokens: int = 200_000
    question: int = 64
    radius: int = 256
    section: int = 2000
    retrieved: int = 512
    rank: int = 8
    clusters: int = 512
    dim: int = 64
    tile_size: int = 32

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.section < 1 or self.tokens % self.section:
            got = f"{self.tokens} tokens and sections of {self.section}"
            raise PatternError(f"long document: expected a whole number of sections, got {got}")

    def positional(self) -> dict[str, Pattern]:
        """The parts that know positions only, each with all before it."""
        local = Window(self.radius)
        asked = local | GlobalTokens(self.question)
        return {"window": local, "+ question": asked, "+ section summaries": asked | Fixed(self.section)}

    def smaller(self, factor: int) -> "LongDocument":
        """The same design on a text that is `factor` times shorter, small enough to be analysed exactly."""
        return replace(
            self,
            tokens=self.tokens // factor // max(self.section // factor, 1) * max(self.section // factor, 1),
            question=max(self.question // factor, 1),
            radius=max(self.radius // factor, 1),
            section=max(self.section // factor, 1),
        )


@dataclass(frozen=True)
class DesignRow:
    """What one step of the design costs, per layer and head, against full attention."""

    name: str
    size: Footprint
    price: Price
    flops_share: float
    bytes_share: float


def design_rows(design: LongDocument, sample: int = 8) -> list[DesignRow]:
    """Every step of the design, adding up; then the prediction beside it, in two forms; and full attention.

    The tiles of a window are all alike, so `sample` of them say what all cost. Retrieved keys count fully, as if none
    lay in the other parts: an upper bound.
    """
    legal = legal_full(1, design.tokens, design.tokens)
    whole = full_footprint(design.tokens, design.tile_size)
    full = attention_price(whole, design.dim, lists=False)

    def row(name: str, size: Footprint, price: Price) -> DesignRow:
        return DesignRow(name, size, price, price.flops / full.flops, price.bytes / full.bytes)

    rows = []
    for name, pattern in design.positional().items():
        size = footprint(pattern, legal, design.tile_size, sample=sample)
        rows.append(row(name, size, attention_price(size, design.dim)))
    last = rows[-1].size
    regular = -(-(design.tokens - design.question) // design.tile_size)
    more = (design.tokens - design.question) * design.retrieved
    size = replace(
        last,
        pairs=last.pairs + more,
        listed=last.listed + regular * design.retrieved,
        computed=last.computed + more,
    )
    rows.append(row("+ retrieved keys", size, attention_price(size, design.dim)))
    lists = prediction_price(design.tokens, design.dim, design.rank, design.clusters)
    rows.append(row("prediction by inverted lists", size, lists))
    tiles = prediction_price(design.tokens, design.dim, design.rank, design.tokens, shared_by=design.tile_size)
    rows.append(row("prediction by tile × key", size, tiles))
    rows.append(row("full attention", whole, full))
    return rows


def design_table(rows: list[DesignRow]) -> str:
    """The rows as a Markdown table."""
    head = ["step", "keys per query", "density", "GFLOP", "of full", "MB moved", "of full"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        predicts = row.name.startswith("prediction")
        keys = "–" if predicts else f"{row.size.pairs / row.size.queries:,.0f}"
        density = "–" if predicts else f"{row.size.density:.2%}"
        work = [f"{row.price.flops / 1e9:,.2f}", f"{row.flops_share:.2%}"]
        lines.append([row.name, keys, density, *work, f"{row.price.bytes / 1e6:,.0f}", f"{row.bytes_share:.2%}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
