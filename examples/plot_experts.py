"""Draw what a run's routers did by step: ``python examples/plot_experts.py RUN experts.svg``. Needs colossus[plot].

Above, the tokens of the busiest expert over the mean, and the entropy of the scores, of each layer; below,
the share of tokens of each expert of one layer.
"""

import json
import sys
from pathlib import Path

from colossus.picture import check_picture, new_figure


def read_rows(run: Path) -> list[dict]:
    """The rows of a run's metrics that tell of experts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if row.get("experts")]
    if not found:
        raise SystemExit(f"{run}: its metrics tell of no experts: the model has none, or no step has ended")
    return found


def draw(rows: list[dict], layer: str):
    """The figure; ``layer`` is the name of the router whose experts are drawn."""
    figure = new_figure(9.0, 8.0)
    busiest, entropy, shares = figure.subplots(3, 1, sharex=True)
    steps = [row["step"] for row in rows]
    for name in rows[0]["experts"]:
        of_layer = [row["experts"][name] for row in rows]
        busiest.plot(steps, [each["max_over_mean"] for each in of_layer], label=name)
        entropy.plot(steps, [each["entropy"] for each in of_layer], label=name)
    tokens = [row["experts"][layer]["tokens"] for row in rows]
    parts = [[each[expert] / (sum(each) or 1) for each in tokens] for expert in range(len(tokens[0]))]
    shares.stackplot(steps, parts, labels=[f"expert {expert}" for expert in range(len(parts))])
    for axes, what in ((busiest, "busiest over mean"), (entropy, "entropy of scores"), (shares, f"tokens: {layer}")):
        axes.set_ylabel(what)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    shares.set_ylim(0.0, 1.0)
    shares.set_xlabel("step")
    return figure


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit("usage: python examples/plot_experts.py RUN_FOLDER PICTURE [ROUTER]")
    run, picture = Path(sys.argv[1]), Path(sys.argv[2])
    check_picture(picture)
    rows = read_rows(run)
    routers = list(rows[0]["experts"])
    layer = sys.argv[3] if len(sys.argv) == 4 else routers[0]
    if layer not in routers:
        raise SystemExit(f"{run} has no router {layer!r}; it has {', '.join(routers)}")
    draw(rows, layer).savefig(picture)


if __name__ == "__main__":
    main()
