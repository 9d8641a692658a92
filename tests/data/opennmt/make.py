"""Makes the checkpoints in this folder with OpenNMT-py itself, and what it computes with them.

    PYTHONPATH=opennmt-py:../../.. python make.py v1

`v1` needs OpenNMT-py 1.2.0 and torchtext 0.5.0, `v2` OpenNMT-py 2.3.0 and torchtext 0.5.0, `v3` and `v3-biases` OpenNMT-py
3.5.1; `v3` also writes the same model as `v3-parts`, with save_format safetensors. Weights are random, norms and biases too;
of some random models the one is taken that says most different things of different sentences, and ends some of them. The
position tables of 5000 rows are cut to 40, which keeps the files small.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from onmt import opts
from onmt.inputters import inputter
from onmt.model_builder import build_base_model
from onmt.models.model_saver import ModelSaver
from onmt.utils.parse import ArgumentParser
from safetensors.torch import load_file, save_file

from makers.references.decode import beam, greedy

HERE = Path(__file__).parent
SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]
N_WORDS, N_ROWS, MAX_LENGTH = 21, 40, 11
BOS, EOS = 2, 3
SHARED = {"share_embeddings": True, "share_decoder_embeddings": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "v1": SHARED,
    "v2": {"pos_ffn_activation_fn": "gelu"},
    "v3": {"pos_ffn_activation_fn": "silu", "layer_norm": "rms", "norm_eps": 1e-5},
    "v3-biases": {"pos_ffn_activation_fn": "gated-gelu", "add_qkvbias": True, "add_ffnbias": True, **SHARED},
}
SIZES = {
    **dict.fromkeys(("word_vec_size", "src_word_vec_size", "tgt_word_vec_size"), 12),
    **dict.fromkeys(("rnn_size", "enc_rnn_size", "dec_rnn_size", "hidden_size", "enc_hid_size", "dec_hid_size"), 12),
    **{"enc_layers": 2, "dec_layers": 1, "heads": 3, "transformer_ff": 14},
}
TRAINING = {
    **dict.fromkeys(("fix_word_vecs_enc", "fix_word_vecs_dec", "freeze_word_vecs_enc", "freeze_word_vecs_dec"), False),
    **dict.fromkeys(("pre_word_vecs_enc", "pre_word_vecs_dec")),
    **{"optim": "adam", "dropout": [0.1], "attention_dropout": [0.1], "param_init": 0.0, "param_init_glorot": True},
    **{"world_size": 1, "parallel_mode": "data_parallel", "use_ckpting": []},
}


class Optimizer:
    """What ModelSaver asks of an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {"training_step": 1, "optimizer": {"state": {}, "param_groups": []}}


def vocabularies(version: int, shared: bool) -> Any:
    """21 source words and 18 target words, or 21 of both."""
    source = [f"w{k}" for k in range(N_WORDS)]
    target = source if shared else [f"v{k}" for k in range(N_WORDS - 3)]
    if version == 3:
        words = {"src": SPECIALS + source, "tgt": SPECIALS + target}
        return inputter.dict_to_vocabs({**words, "data_task": "seq2seq", "decoder_start_token": "<s>"})
    features = (0, 0) if version == 1 else (None, None)
    counts = {
        side: Counter({word: 100 - k for k, word in enumerate(words)})
        for side, words in (("src", source), ("tgt", target))
    }
    fields = inputter.get_fields("text", *features)
    return inputter._build_fields_vocab(fields, {**counts, "corpus_id": Counter()}, "text", shared, 1, 1000, 0, 1000, 0)


def randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.3 * noise if name.endswith("weight") else 0.2 * noise
            elif parameter.ndim == 1:
                noise *= 0.3
            else:
                noise *= (3.0 if "context_attn" in name or "generator" in name else 1.5) * parameter.shape[1] ** -0.5
            parameter.copy_(noise)
            if "generator" in name and name.endswith("bias"):
                parameter[1] = -30.0  # whole targets and single steps see padding otherwise; a trained model has none
                parameter[EOS] += 1.0
    model.eval()
    for module in model.modules():
        if hasattr(module, "dropout_p"):
            module.dropout_p = 0.0


def runner(model: Any, version: int) -> Any:
    """(src_ids [1, src], tgt_ids [1, tgt]) -> logits [1, tgt, vocab]"""

    def run(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([source.shape[1]])
        if version == 3:
            source, target = source[:, :, None], target[:, :, None]
            states = model.encoder(source, lengths)[0]
            model.decoder.init_state(source, states, None)
            return model.generator(model.decoder(target, states, src_len=lengths)[0])
        source, target = source.T[:, :, None], target.T[:, :, None]  # time came first in these versions
        _, states, lengths = model.encoder(source, lengths)
        model.decoder.init_state(source, states, None)
        return model.generator[0](model.decoder(target, states, memory_lengths=lengths)[0]).transpose(0, 1)

    return run


def cut_positions(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tables = {f"{side}.embeddings.make_embedding.pe.pe" for side in ("encoder", "decoder")}
    return {name: tensor[:N_ROWS].clone() if name in tables else tensor for name, tensor in weights.items()}


def save(saver: ModelSaver, model: Any, path: Path) -> None:
    saver._save(1, model)
    (HERE / f"{path.stem}_step_1.pt").rename(path)
    content = torch.load(path, weights_only=False)
    torch.save({**content, "model": cut_positions(content["model"])}, path)


def save_parts(saver: ModelSaver, model: Any, path: Path) -> None:
    """`path` and the file of weights beside it."""
    saver._st_save(1, model)
    for suffix in (".pt", ".safetensors"):
        (HERE / f"{Path(saver.base_path).name}_step_1{suffix}").rename(path.with_suffix(suffix))
    weights = path.with_suffix(".safetensors")
    save_file(cut_positions(load_file(weights)), weights)


def main(name: str) -> None:
    version = int(name[1])
    options = ArgumentParser.defaults(opts.model_opts)
    transformer = {"encoder_type": "transformer", "decoder_type": "transformer", "position_encoding": True}
    vars(options).update({**transformer, "self_attn_type": "scaled-dot", **SIZES, **TRAINING, **VARIANTS[name]})
    words = vocabularies(version, shared=bool(VARIANTS[name].get("share_embeddings")))
    model = build_base_model(options, words) if version == 3 else build_base_model(options, words, gpu=False)
    run = runner(model, version)
    first = len(SPECIALS)
    draw = random.Random(3)
    n_source = len(words["src"] if version == 3 else words["src"].base_field.vocab)
    n_target = len(words["tgt"] if version == 3 else words["tgt"].base_field.vocab)
    sources = [[draw.randrange(first, n_source) for _ in range(draw.randint(1, 9))] for _ in range(200)]
    targets = [[BOS, *(draw.randrange(first, n_target) for _ in range(7))] for _ in range(5)]

    def variety(seed: int) -> int:
        randomise(model, seed)
        best = [greedy(run, source, bos=BOS, eos=EOS, max_length=MAX_LENGTH) for source in sources[:40]]
        ended = sum(tokens[-1] == EOS for tokens in best)
        return len(set(map(tuple, best))) + 2 * min(ended, len(best) - ended, 8)

    seed = max(range(20), key=variety)
    randomise(model, seed)
    saver = ModelSaver(str(HERE / name), model, options, words, Optimizer())
    save(saver, model, HERE / f"{name}.pt")
    if name == "v3":
        save_parts(saver, model, HERE / "v3-parts.pt")
    with torch.no_grad():
        logits = [
            run(torch.tensor([source]), torch.tensor([target]))[0]
            for source, target in zip(sources, targets, strict=False)
        ]
    found = []
    for width, count, kept in ((1, 200, 1), (4, 200, 1), (4, 25, 4)):
        settings = {"bos": BOS, "eos": EOS, "max_length": MAX_LENGTH, "beam": width, "length_penalty": 0.6}
        hypotheses = [beam(run, source, **settings)[:kept] for source in sources[:count]]
        rounded = [[[tokens, round(score, 6)] for tokens, score in one] for one in hypotheses]
        found.append({"beam": width, "penalty": 0.6, "hypotheses": rounded})
    file = HERE / "expected.json"
    expected = json.loads(file.read_text()) if file.exists() else {}
    expected[name] = {
        "sources": sources,
        "targets": targets,
        "logits": [[[round(x, 5) for x in row] for row in one.tolist()] for one in logits],
        "found": found,
    }
    file.write_text(json.dumps(expected, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
