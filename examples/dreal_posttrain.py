"""Train a drafter on: for the blocks it drafts itself (D-REAL), or with one of the losses that D-REAL is compared with.

The drafter is a folder or hub id, released or from train_drafter.py, and the target's answers are written and read as
there.  Each step draws the same anchors in the same answers whatever the objective is:

    dreal      the expected number of accepted drafts, of blocks that the drafter drafts and the target scores online
    tv_static  overlap with the target along those blocks, later slots weighted by a fixed decay
    dpace      cross-entropy along the answers under D-PACE weights
    baseline   the loss that the drafter's family is first trained with

Defaults are the paper's: one epoch, learning rate 2e-4, 512 anchors; a block has the drafter's own length.

    python examples/dreal_posttrain.py --target Qwen/Qwen3-8B --drafter DSPARK --out dreal --prompts PROMPTS.jsonl
    torchrun --nproc-per-node 8 examples/dreal_posttrain.py --target Qwen/Qwen3-8B --drafter DSPARK --out dreal ...
    python examples/dreal_posttrain.py --target tiny --drafter tiny/dspark --preset tiny --out dreal     # on a laptop
    python examples/dreal_posttrain.py ... --objective baseline --out more --answers dreal.answers.jsonl
    python examples/dreal_posttrain.py ... --resume                        # go on after an interruption

OUT becomes the new drafter's folder, in the same format.  The bar shows J, the mean number of accepted drafts of a
block, a, the mean overlap of a slot, and `reused`, the share of slots whose target state was there already.  The last
line is one JSON document; its `counts` are those of `fast.posttraining.RoundLosses` over all steps of this run.
"""

import json
from functools import partial

from fast import training_program as program
from fast.drafters import Drafter
from fast.posttraining import OBJECTIVES, trainer_of
from models.checkpoint import digest, locate

SIZES = {  # of a step, of its data
    "released": {"anchors": 512, "sequences": 32, "learning_rate": 2e-4, "answer_tokens": 4096},
    "tiny": {"anchors": 64, "sequences": 8, "learning_rate": 2e-4, "answer_tokens": 512},
}


def main(arguments=None):
    """Train, or say in one line what is wrong."""
    program.launch(parse(arguments), begin)


def begin(options, _, target, text):
    """The drafter to go on with: (its config.json, itself, how to make its trainer, what else identifies the training).

    Weights are trained in float32, also those of a bfloat16 target's drafter.
    """
    snapshot = locate(options.drafter, revision=options.drafter_revision)
    raw = json.loads((snapshot.folder / "config.json").read_bytes())
    drafter = Drafter.load(snapshot.folder, target, device=options.device)
    make = partial(trainer_of, options.objective, recompute=options.recompute)
    about = {"drafter": snapshot.name, "drafter_revision": snapshot.revision or f"files {digest(snapshot.folder)}"}
    return raw, drafter, make, about


def parse(arguments):
    """The command line; every default is the paper's."""
    parser = program.new_parser(__doc__, SIZES)
    add = parser.add_argument
    add("--drafter", required=True, metavar="ID_OR_FOLDER", help="where to start")
    add("--drafter-revision", help="branch, tag or commit of its hub id")
    add("--objective", choices=OBJECTIVES, default="dreal", help="default %(default)s")
    add("--epochs", type=int, default=1)
    add("--recompute", action="store_true", help="compute activations again in the backward pass, to save memory")
    return program.settle(parser.parse_args(arguments), SIZES)


if __name__ == "__main__":
    main()
