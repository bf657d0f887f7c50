"""Train a block drafter for a target, on answers that the target writes itself.

The target answers the prompts once, at temperature 1 (OUT.answers.jsonl, written line by line and resumable).  Then it
stays frozen: each step reads some answers with it, once each, and trains the drafter behind many random positions of
them.  Nothing else is stored.  Defaults are those of the released drafters for Qwen3.

    python examples/train_drafter.py --target Qwen/Qwen3-4B --family dspark --out dspark --prompts PROMPTS.jsonl
    torchrun --nproc-per-node 8 examples/train_drafter.py --target Qwen/Qwen3-4B --family dspark --out dspark ...
    python examples/train_drafter.py --target TINY_TARGET --preset tiny --family attention --out head    # on a laptop
    python examples/train_drafter.py ... --limit 4                        # a trial of every part in seconds
    python examples/train_drafter.py ... --resume                         # go on after an interruption

OUT becomes a folder in the format in which such drafters are released, which SGLang and vLLM load; the training's state
is OUT.checkpoint.  Every number of processes makes the same steps.  The last line is one JSON document.
"""

import json
from functools import partial

from fast import training
from fast import training_program as program
from fast.draft_losses import RECIPES
from models.config import DecoderConfig
from models.drafter_config import DrafterConfig
from models.drafter_dialects import spread_taps

SIZES = {  # of a drafter, of a step, of its data
    "released": {"layers": 5, "taps": 5, "rank": None, "anchors": 512, "sequences": 512, "learning_rate": 6e-4,
                 "answer_tokens": 4096},
    "tiny": {"layers": 2, "taps": 3, "rank": 32, "anchors": 64, "sequences": 8, "learning_rate": 2e-3,
             "answer_tokens": 512},
}  # fmt: skip
RANKS = {"dflash": None, "dspark": 256, "attention": 512, "dflash2": 256}  # of the head, in the released sizes
BLOCKS = {"dflash": 7, "dspark": 7, "attention": 7, "dflash2": 8}
PARTS = {"dspark": (), "attention": ("short_conv", "slot_embed")}  # what a family is released with
HEADS, CANDIDATES, GROUP = 4, 16, 16  # of a prefix-attention head, of a slot, channels of a convolution's kernel


def main(arguments=None):
    """Train, or say in one line what is wrong."""
    program.launch(parse(arguments), begin)


def begin(options, snapshot, target, text):
    """A new drafter: (its config.json, itself, how to make its trainer, what else identifies the training)."""
    mask, widths = mask_id(options, target, text), json.loads((snapshot.folder / "config.json").read_bytes())
    raw = new_config(widths, options, mask)
    drafter = training.new_drafter(DrafterConfig.from_dict(raw), target, options.seed)
    return raw, drafter, partial(training.Trainer, recipe=RECIPES[options.objective]), {}


# The drafter


def new_config(target, options, mask):
    """config.json of a new drafter as its family is released: the target's own, with the drafter's keys.

    dflash, dspark: DeepSpec's dialect; attention: the same with specfloor's keys; dflash2: z-lab's.  An objective that
    does not train a confidence head leaves it out.
    """
    family, layers = options.family, options.layers
    widths = DecoderConfig.from_dict(target)
    config = target | {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": layers,
        "num_target_layers": widths.num_layers, "layer_types": ["full_attention"] * layers,
        "head_dim": widths.head_dim, "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    if "rope_parameters" in config:  # both spellings of the rotary base: readers look for one of them
        config["rope_theta"] = widths.rope.theta
    elif not config.get("rope_scaling"):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": widths.rope.theta}
    block = {
        "block_size": options.block_size, "mask_token_id": mask,
        "target_layer_ids": spread_taps(widths.num_layers, options.taps),
    }  # fmt: skip
    if family == "dflash2":
        selector = {"selector_rank": options.rank, "selector_top_k": CANDIDATES}
        conv = {"conv_kernel_size": 2, "conv_group_size": GROUP}
        return config | {
            "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": block | selector | conv,
        }  # fmt: skip
    confidence = family != "dflash" and RECIPES[options.objective].confidence > 0
    config |= block | {
        "sample_from_anchor": True, "num_anchors": options.anchors, "enable_confidence_head": confidence,
        "markov_rank": 0 if family == "dflash" else options.rank,
    }  # fmt: skip
    if family == "dflash":
        return config
    config |= {
        "confidence_head_with_markov": confidence, "markov_head_type": "attn" if family == "attention" else "vanilla",
    }  # fmt: skip
    conv, slots = "short_conv" in options.parts, "slot_embed" in options.parts
    if conv or slots or family == "attention":
        block = {"short_conv_kernel_size": 2, "short_conv_group_size": GROUP} if conv else {}
        config |= {"short_conv": conv, "slot_embed": slots, "dflash_config": {"slot_embed": slots} | block}
        config |= {"short_conv_group_size": GROUP} if conv else {}
    if family == "dspark":
        return config
    return config | {
        "markov_num_heads": HEADS, "markov_head_dim": options.rank // HEADS, "markov_mlp_hidden": 4 * options.rank,
        "markov_gate_mode": "none", "markov_anchor_kv": False, "markov_out_scale": 0.35,
        "markov_seed_std_pred": 0.0602, "markov_seed_std_succ": 0.0664,
        "slot_embed_std": 0.02, "slot_embed_depth_frac": 0.4,
        "nominate_alpha": RECIPES["attention"].nomination, "nominate_topk": CANDIDATES,
        "causal_draft_mask": False, "is_causal": False,
    }  # fmt: skip


def mask_id(options, target, text):
    """The id that fills the block: asked for, the tokenizer's mask, or the first row of the table without a token."""
    if options.mask_id is not None:
        return options.mask_id
    if "mask_token" in text.special_tokens:
        return text.tokenizer.token_to_id(text.special_tokens["mask_token"])
    if text.vocab_size == target.vocab_size:
        raise ValueError(
            "the tokenizer names no mask token and leaves no spare id; say which one to use with --mask-id"
        )
    return text.vocab_size


def parse(arguments):
    """The command line."""
    parser = program.new_parser(__doc__, SIZES)
    add = parser.add_argument
    add("--family", required=True, choices=tuple(RANKS))
    add("--objective", choices=tuple(RECIPES), help="default: the family's own")
    add("--layers", type=int)
    add("--block-size", type=int)
    add("--rank", type=int, help="width of the head")
    add("--parts", nargs="*", choices=PARTS["attention"], help="of dspark and attention (default: as released)")
    add("--taps", type=int, help="how many of the target's layers are read")
    add("--mask-id", type=int, help="the id that fills the block (default: the tokenizer's mask, or a spare id)")
    add("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.family == "dflash" and options.rank is not None:
        parser.error("--rank is the width of a head, and a dflash drafter has none")
    if options.parts is None:
        options.parts = PARTS.get(options.family, ())
    elif options.family not in PARTS:
        parser.error(f"--parts is about dspark and attention drafters, not {options.family}")
    options = program.settle(options, SIZES)
    for name, defaults in (("rank", RANKS), ("block_size", BLOCKS)):
        if getattr(options, name) is None:
            setattr(options, name, defaults[options.family])
    options.objective = options.objective or options.family
    return options


if __name__ == "__main__":
    main()
