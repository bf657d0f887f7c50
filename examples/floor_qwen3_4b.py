"""How much rejection is forced on a block drafter by what it may look at?

The target writes answers to prompts; at anchors inside them M continuations are walked, and the information
floors of order 0 (a proposal that sees the prefix only) and order 1 (one realised token more) are estimated
slot by slot.  Every anchor is a line of the record file; the same command resumes a stopped run.

    python examples/floor_qwen3_4b.py                                     # the paper's setting: Qwen3-4B, one GPU
    python examples/floor_qwen3_4b.py --target FOLDER --anchors 12        # any Qwen3 or Llama-family model
    python examples/floor_qwen3_4b.py --target toy --anchors 24           # no model, no network: ten seconds
    python examples/floor_qwen3_4b.py --target FOLDER --backend reference --limit 2    # NumPy, two anchors a domain
    torchrun --nproc-per-node 8 examples/floor_qwen3_4b.py                # the work dealt to eight GPUs, the same file

Prints an estimate of memory and time, a progress bar with the running floors, a table per domain and pooled,
and one JSON document as the last line.  `python -m reference.report RECORDS` prints it again without a model.
"""

from importlib import import_module

from reference import program


def main(arguments=None):
    """Measure, or say in one line what is wrong."""
    parser = program.parser(__doc__)
    parser.set_defaults(drafter=[])
    options = parser.parse_args(arguments)
    program.main(options, import_module(options.backend))


if __name__ == "__main__":
    main()
