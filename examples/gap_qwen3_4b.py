"""How much of a drafter's rejection is forced on it, and how much is its own fault?

Walks the target's continuations as `floor_qwen3_4b.py` does and, from the same forward passes, reads one or several
drafters on them: risk = information floor + model gap at every slot, exposure to their own tokens, serving risk,
dependence, accepted length, and paired differences between drafters.

    python examples/gap_qwen3_4b.py                                      # DSpark on Qwen3-4B, the paper's Table 6
    python examples/gap_qwen3_4b.py --drafter deepseek-ai/dspark_qwen3_4b_block7 deepseek-ai/dflash_qwen3_4b_block7
    python examples/gap_qwen3_4b.py --target FOLDER --drafter FOLDER --also response information --plot gaps.png
    python examples/gap_qwen3_4b.py --target toy --drafter parallel chained --anchors 12    # no model: half a minute
    torchrun --nproc-per-node 8 examples/gap_qwen3_4b.py                 # the work dealt to eight GPUs, the same file

Prints the floors, one table per question and drafter, and one JSON document as the last line.
`python -m reference.report RECORDS` prints it again without a model, `--against OTHER` compares two runs.
"""

from importlib import import_module

import numpy as np

from reference import program, report


def main(arguments=None):
    """Measure, or say in one line what is wrong."""
    parser = program.parser(__doc__)
    parser.add_argument("--drafter", nargs="+", default=["deepseek-ai/dspark_qwen3_4b_block7"], metavar="ID_OR_FOLDER")
    parser.add_argument(
        "--slot-convention",
        choices=("auto", "anchor", "in-place"),
        default="auto",
        help="which position an output predicts, if the file leaves it open: anchor = the next one, in-place = its own",
    )
    options = parser.parse_args(arguments)
    program.main(options, import_module(options.backend), plot)


def plot(summary, path):
    """Draw risk at every slot as floor (grey) plus gap, one panel a drafter (Fig. 4 form); needs matplotlib."""
    plt = report.check_plot(path)
    found = {name.split(" ", 1)[1]: t for name, t in summary["tables"].items() if name.startswith("drafter ")}
    figure, panels = plt.subplots(1, len(found), figsize=(4.4 * len(found), 3.4), sharey=True, squeeze=False)
    for panel, (name, table) in zip(panels[0], found.items(), strict=True):
        columns = dict(zip(table["columns"], np.array(table["rows"], dtype=object).T, strict=True))
        slots, floor, gap = (np.array(columns[c], dtype=float) for c in ("slot", table["columns"][1], "gap"))
        panel.bar(slots, floor, color="0.6", label=f"information floor {table['columns'][1]}")
        low, high = np.array([ends or [None, None] for ends in columns["gap 95%"]], dtype=float).T
        panel.bar(
            slots,
            gap,
            bottom=floor,
            color="tab:red",
            label="model gap",
            yerr=np.maximum([gap - low, high - gap], 0),
            capsize=2,
        )
        if "R self" in columns:
            panel.plot(slots, np.array(columns["R self"], dtype=float), "k.", label="risk on its own tokens")
        panel.set(title=name, xlabel="slot k")
        panel.legend(fontsize=8, frameon=False, loc="upper left", ncols=2, columnspacing=1)
    panels[0][0].set(ylabel="rejection", ylim=(0, 1.2))  # the legend stands above 1
    figure.suptitle(report.conditions(summary), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
