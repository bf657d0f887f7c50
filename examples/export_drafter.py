"""Write a drafter's folder, of whatever dialect, in the layout that a serving engine loads, and say how to serve it.

    python examples/export_drafter.py --target Qwen/Qwen3-4B --drafter FOLDER --layout sglang --out exported
    python examples/export_drafter.py --target Qwen/Qwen3-4B --drafter FOLDER --layout speculators --out exported

sglang: a drafter whose rows predict in place becomes z-lab's DFlash or DFlash2 (algorithm DFLASH), one that samples
from its anchor DeepSpec's DSpark (DSPARK), which vLLM loads too.  SGLang has no DSPARK without a Markov head, so there
a headless drafter gets one of width 1 that is zero and adds nothing.  speculators: what that project saves and vLLM
loads.  Weights are copied bit for bit; what a layout cannot hold is refused.  The folder is read back, and has to be
the same drafter, before the command is printed.  The last line is one JSON document.

Seconds, and memory for the largest tensor.  The engines themselves are not run here.
"""

import argparse
import json
import math
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from models.checkpoint import DTYPES, SINGLE, CheckpointError, locate
from models.config import ConfigError, DecoderConfig
from models.drafter_checkpoint import EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, read_drafter
from models.drafter_config import DrafterConfig

WINDOWS = {"query": "|query - key|", "context": "query - key, context only", "anchor": "anchor - key"}


def main(arguments=None):
    """Export, or say in one line what is wrong."""
    options = parse(arguments)
    try:
        run(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def run(options):
    """Read, write, read back, and print the command."""
    source, target = locate(options.drafter), locate(options.target, revision=options.revision)
    in_place = {"auto": None, "anchor": False, "in-place": True}[options.slot_convention]
    config, raw = DrafterConfig.from_folder(source.folder, in_place=in_place), read_json(source.folder)
    stored, widths = read_drafter(source.folder, config), DecoderConfig.from_folder(target.folder)
    mine = config.hidden_size, config.vocab_size, config.target_layers or widths.num_layers
    if mine != (widths.hidden_size, widths.vocab_size, widths.num_layers):
        raise CheckpointError(f"{source.name} was trained on another target: its width, vocabulary or layers differ")
    if config.architecture != "qwen3":
        raise ConfigError("only drafters with Qwen3 layers have another layout; engines load a Gemma drafter as it is")
    verifier = {"name_or_path": options.target, "architectures": read_json(target.folder).get("architectures") or []}
    placed = replace(config, target_layers=widths.num_layers)
    new, notes = to_sglang(placed, raw) if options.layout == "sglang" else to_speculators(placed, raw, verifier)
    if options.out.exists() and any(options.out.iterdir()):
        raise CheckpointError(f"{options.out} is not empty; choose another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_text(f"{json.dumps(new, indent=2)}\n", encoding="utf-8")
    written = DrafterConfig.from_folder(options.out)
    save(options.out / SINGLE, stored, config, written)
    notes += read_back(options.out, stored, config, written)
    for note in notes:
        print(f"note: {note}")
    command = serve_command(options, new, config)
    print(command)
    print(json.dumps({"example": "export_drafter", "layout": options.layout, "out": str(options.out),
                      "family": config.family, "notes": notes, "command": command}))  # fmt: skip


# The layouts


def to_sglang(config, raw):
    """(config.json, notes) of the layout SGLang loads."""
    if config.draft_vocab_size != config.vocab_size:
        raise ConfigError("this layout has no draft vocabulary: export to speculators")
    if is_patched(config):
        conv = {"short_conv_kernel_size": config.conv_taps, "short_conv_group_size": config.short_conv}
        own = (raw.get("dflash_config") or {}) | {"slot_embed": config.slot_embeddings}
        own |= conv if config.short_conv else {}
        block = {"sample_from_anchor": not config.in_place, "dflash_config": own}
        note = "its convolutions, slot embeddings or prefix-attention head need SGLang with that drafter's patch"
        return raw | rope_keys(config, raw) | block, [note]
    head = {"block_size": config.block_size, "mask_token_id": config.mask_id, "target_layer_ids": list(config.taps)}
    widths = widths_of(config, raw) | {"num_target_layers": config.target_layers}
    if not config.in_place:
        if config.family == "dflash2":
            raise ConfigError("SGLang's DFlash2 predicts in place, and this drafter samples from its anchor")
        if any(config.windows) or any(config.causal) or scales_of(config):
            raise ConfigError("this layout holds no sliding window, causal layer or scale, and the drafter has one")
        notes = [] if config.markov_rank else ["it has no Markov head; one of width 1 that is zero was added"]
        return {
            "architectures": ["Qwen3DSparkModel"], **widths, **head, "sample_from_anchor": True,
            **markov_of(config), "markov_rank": config.markov_rank or 1,
            "markov_head_type": config.markov_type or "vanilla",
        }, notes  # fmt: skip
    if config.markov_rank:
        raise ConfigError("SGLang's DSPARK samples from the anchor, and this drafter predicts in place")
    causal = {"is_causal": config.causal[0]}
    if len(set(config.causal)) > 1:
        causal = {}
        if config.causal != tuple(window is not None for window in config.windows):
            raise ConfigError("this layout cannot say which of its layers are causal")
    second = config.family == "dflash2"
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"], **widths, **causal,
        "block_size": config.block_size, "markov_rank": 0,
        "dflash_config": head | scales_of(config) | selector_of(config) | {"sample_from_anchor": False},
    }, []  # fmt: skip


def to_speculators(config, raw, verifier):
    """(config.json, notes) of the layout the speculators project saves and vLLM loads."""
    if is_patched(config):
        raise ConfigError("speculators has no such convolutions, slot embeddings or prefix-attention head")
    if scales_of(config):
        raise ConfigError(f"speculators has no {', '.join(scales_of(config))}, and the drafter has")
    sliding = [causal for causal, window in zip(config.causal, config.windows, strict=True) if window]
    if sum(sliding) != sum(config.causal) or len(set(sliding)) > 1:
        raise ConfigError("speculators' full layers are never causal and its sliding ones all alike; these are not so")
    kinds = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.proposals, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    notes = []
    if config.markov_type not in ("", "vanilla"):
        notes.append(f"speculators loads a {config.markov_type} Markov head, vLLM the vanilla one only")
    if config.in_place == (config.family == "dspark"):
        notes.append("its slots are not its family's usual ones: serve it with a version that reads sample_from_anchor")
    return {
        "architectures": [kinds[config.family]], "speculators_model_type": config.family,
        "transformer_layer_config": widths_of(config, raw), "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size, "mask_token_id": config.mask_id, "sample_from_anchor": not config.in_place,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "sliding_window_non_causal": bool(sliding) and not any(sliding), "tie_word_embeddings": False,
        **(markov_of(config) if config.family == "dspark" else {}), **selector_of(config),
        "speculators_config": {
            "algorithm": config.family, "proposal_methods": [proposal], "default_proposal_method": "greedy",
            "verifier": verifier,
        },
    }, notes  # fmt: skip


def widths_of(config, raw):
    """The keys of a Qwen3 config that describe the drafter's layers."""
    sliding = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    widths = {window for window in config.windows if window}
    if len(widths) > 1:
        raise ConfigError(f"one sliding_window stands for all layers, and the drafter's are {sorted(widths)}")
    return {
        "model_type": "qwen3", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "layer_types": sliding,
        "use_sliding_window": bool(widths), "sliding_window": max(widths, default=None), **rope_keys(config, raw),
    }  # fmt: skip


def rope_keys(config, raw):
    """Rotary keys in both spellings, with whatever scaling the source has."""
    old = (raw.get("transformer_layer_config") or {}) | raw
    given = {key: old[key] for key in ("rope_parameters", "rope_scaling", "max_position_embeddings") if old.get(key)}
    if config.rope.kind == "default":
        given = given | {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
    return given | {"rope_theta": config.rope.theta}


def scales_of(config):
    """The keys of those scalings that the drafter has."""
    values = {
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.softcap, None),
    }
    return {key: value for key, (value, off) in values.items() if value != off}


def markov_of(config):
    """The keys of a Markov head and of its confidence head."""
    head = {"markov_rank": config.markov_rank, "markov_head_type": config.markov_type,
            "enable_confidence_head": config.confidence}  # fmt: skip
    return head | ({"confidence_head_with_markov": config.confidence_with_markov} if config.confidence else {})


def selector_of(config):
    """The keys of a DFlash2 selector, none for other families."""
    if config.family != "dflash2":
        return {}
    return {
        "selector_rank": config.selector_rank, "selector_top_k": config.lattice,
        "conv_group_size": config.short_conv, "conv_kernel_size": config.conv_taps,
    }  # fmt: skip


def is_patched(config):
    """Whether the drafter has parts that no engine loads unpatched."""
    return config.slot_embeddings or config.family == "attention" or (config.short_conv and config.family != "dflash2")


# The folder


def save(path, stored, config, written):
    """A safetensors file of the stored tensors, one at a time and as they are, and of zeros for those that are new.

    Copies of the target's tables go along where the layout has them: DeepSpec's always, speculators' reduced head.
    """
    shapes = written.tensor_shapes()
    copies = {"deepspec": (EMBEDDING, HEAD), "specfloor": (EMBEDDING, HEAD)}.get(written.dialect, ())
    if stored.d2t is not None:
        copies = HEAD, TO_TARGET, TO_DRAFT
    shapes |= {name: stored.parts[name][0].shape for name in copies if name in stored.parts}
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype = stored.parts[name if name in stored.parts else "fc.weight"][0].dtype
        size = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end := end + size]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            if name in stored.parts:
                file.write(stored.read(name)[1].tobytes())
            else:
                file.write(np.zeros(entry["shape"], DTYPES[entry["dtype"]]).tobytes())


def read_back(folder, stored, config, found):
    """Notes on what the layout counts otherwise; CheckpointError unless the folder holds the same drafter."""
    head = {"family": "dspark", "markov_rank": 1, "markov_type": "vanilla"}
    head = head if (config.markov_rank, found.markov_rank) == (0, 1) else {}
    layout = ("dialect", "window_rule", "notes", "target_layers")
    expected = replace(config, **head, **{name: getattr(found, name) for name in layout})
    changed = [f.name for f in fields(found) if getattr(found, f.name) != getattr(expected, f.name)]
    written = read_drafter(folder, found)
    changed += [name for name in stored.own if written.read(name)[1].tobytes() != stored.read(name)[1].tobytes()]
    if changed:
        raise CheckpointError(f"{folder} reads back as another drafter: {', '.join(changed)} differ; do not serve it")
    if any(config.windows) and found.window_rule != config.window_rule:
        before, after = WINDOWS[config.window_rule], WINDOWS[found.window_rule]
        return [f"trained with windows over {before}, served over {after}: the same only up to a window of context"]
    return []


def serve_command(options, new, config):
    """The command line that serves the target with the exported drafter."""
    if options.layout == "sglang":
        algorithm = "DSPARK" if new["architectures"] == ["Qwen3DSparkModel"] else "DFLASH"
        return shlex.join([
            "python", "-m", "sglang.launch_server", "--model-path", options.target, "--speculative-algorithm",
            algorithm, "--speculative-draft-model-path", str(options.out), "--speculative-num-draft-tokens",
            str(config.proposals + 1),
        ])  # fmt: skip
    setting = {"method": "dspark" if config.family == "dspark" else "dflash", "model": str(options.out),
               "num_speculative_tokens": config.proposals}  # fmt: skip
    if config.family == "dspark":
        setting["draft_sample_method"] = "probabilistic"
    return shlex.join(["vllm", "serve", options.target, "--speculative-config", json.dumps(setting)])


def read_json(folder):
    """A folder's config.json as it is stored."""
    return json.loads((Path(folder) / "config.json").read_bytes())


def parse(arguments):
    """The command line."""
    title, _, about = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=title, epilog=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, metavar="ID_OR_FOLDER", help="what the drafter drafts for")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--drafter", required=True, metavar="ID_OR_FOLDER")
    add("--slot-convention", choices=("auto", "anchor", "in-place"), default="auto",
        help="which position an output predicts, if the file leaves it open")  # fmt: skip
    add("--layout", required=True, choices=("sglang", "speculators"))
    add("--out", required=True, type=Path, metavar="FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
