"""SentencePiece models in folders of the transformers library: the ids that its tokenizers give to pieces and languages.

A model numbers its pieces. A tokenizer class shifts these numbers to make room for its own tokens, before or after them. The
rules and the order of languages are those of the library's SentencePiece tokenizers (its versions up to 4), with which the
published models were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.errors import ConfigError, TokenizerError
from tfexport.models.formats.shards import json_object
from tfexport.text.sentencepiece import PieceModel, Pieces
from tfexport.text.tokenizers import TextTokenizer

_COMPLETE = "Check that it was copied completely."

_M2M_LANGUAGES = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy
    id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru
    sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""
"""Languages of M2M-100 in the order of their ids, which follow those of vocab.json. No file contains them. The same is true
of the languages below."""

_MBART_LANGUAGES = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
"""

_MBART_50_LANGUAGES = f"""{_MBART_LANGUAGES}
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN
    te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""

_NLLB_LANGUAGES = """
    ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab
    ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl
    bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn
    cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn
    est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn
    gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn
    ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab
    kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn
    kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn
    lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn
    mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn
    nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab quy_Latn
    ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn
    sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn
    szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn
    tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn
    vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn
"""

_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
"""First tokens of fairseq's dictionaries. The first three of SentencePiece are <unk>, <s> and </s>."""

_FILES = ("sentencepiece.bpe.model", "spm.model", "spiece.model")

_MOST = 100_000
"""Maximum number of tokens that a number in a small file may request."""


@dataclass(frozen=True)
class FolderPieces:
    """The tokenizers of both sides, and the ids before and after the text of a source, including the model's eos."""

    source: TextTokenizer
    target: TextTokenizer
    before: tuple[int, ...]
    after: tuple[int, ...]


_SAVE = "Save a tokenizer.json there: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."


class NotRead(Exception):
    """The reason why a folder's tokenizer is not read, and advice. The reader of folders always catches it."""

    def __init__(self, why: str, advice: str = _SAVE):
        super().__init__(f"{why}. {advice}")


def read_pieces(path: Path, model_type: str, language: str | None) -> FolderPieces:
    """The tokenizers of a folder without tokenizer.json.

    Args:
        language: language of the sources, if the user gives it.

    Raises:
        NotRead: a part of the tokenizer is missing or not supported; the message names it.
        TokenizerError: a file cannot be read.
        RuntimeUnavailable: SentencePiece is not installed.
    """
    settings = read_json(path / "tokenizer_config.json")
    if settings.get("sp_model_kwargs"):
        raise NotRead(
            f"tokenizer_config.json has sp_model_kwargs {settings['sp_model_kwargs']!r}, which is not supported"
        )
    if model_type == "marian" and (path / "source.spm").is_file():
        vocabulary = _vocabulary(path / "vocab.json")
        target_file = path / "target_vocab.json"
        source = _looked_up(path / "source.spm", vocabulary)
        target = _looked_up(path / "target.spm", _vocabulary(target_file) if target_file.is_file() else vocabulary)
        return FolderPieces(source, target, (), (_of(vocabulary, "</s>", path),))
    file_name = next((name for name in _FILES if (path / name).is_file()), None)
    if file_name is None:
        raise NotRead("it has no tokenizer.json and no SentencePiece model")
    if model_type == "m2m_100" and (path / "vocab.json").is_file():
        added, _ = _added(path, settings)
        vocabulary = _with_languages(_vocabulary(path / "vocab.json"), settings) | added
        side = _looked_up(path / file_name, vocabulary)
        spoken = _language(vocabulary, settings, language, path)
        return FolderPieces(side, side, (spoken,), (_of(vocabulary, "</s>", path),))
    return _numbered(path, path / file_name, model_type, settings, language)


# --- models whose pieces keep their own numbers


@dataclass(frozen=True)
class _Numbering:
    """The ids of the tokens that a tokenizer class adds to the model's."""

    first: tuple[str, ...] = ()
    """Tokens with ids 0, 1, ...; the model's pieces of these numbers are skipped."""
    offset: int = 0
    """Offset of the model's own numbers."""
    last: tuple[str, ...] = ()
    """Tokens with ids after all pieces."""
    language: str = ""
    """Place of the language in a source: `before` or `after`; empty for none."""


def _numbering(kind: str, settings: Mapping[str, Any]) -> _Numbering:
    match kind:
        case "T5Tokenizer" | "MT5Tokenizer":
            sentinels = _count(settings, "extra_ids", 100)
            return _Numbering(last=tuple(f"<extra_id_{index}>" for index in reversed(range(sentinels))))
        case "PegasusTokenizer":
            offset = _count(settings, "offset", 103)
            unused = tuple(f"<unk_{index}>" for index in range(2, offset))
            return _Numbering(("<pad>", "</s>", "<mask_1>", "<mask_2>", *unused)[: offset + 2], offset)
        case "MBartTokenizer":
            return _Numbering(_FAIRSEQ, 1, (*_MBART_LANGUAGES.split(), "<mask>"), "after")
        case "MBart50Tokenizer":
            return _Numbering(_FAIRSEQ, 1, (*_MBART_50_LANGUAGES.split(), "<mask>"), "before")
        case "NllbTokenizer":
            side = "after" if settings.get("legacy_behaviour") else "before"
            return _Numbering(_FAIRSEQ, 1, (*_NLLB_LANGUAGES.split(), "<mask>"), side)
    raise NotRead(f"its tokenizer_class {kind!r} is not read without a tokenizer.json")


def _numbered(
    path: Path, file: Path, model_type: str, settings: Mapping[str, Any], language: str | None
) -> FolderPieces:
    model, config = PieceModel.read(file), read_json(path / "config.json")
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class") or _usual(model_type, model, config)
    numbering = _numbering(str(kind).removesuffix("Fast"), settings)
    first, offset = numbering.first, numbering.offset
    pieces = {name: at + offset for at, name in enumerate(model.names) if at + offset >= len(first)}
    own = {token: at for at, token in enumerate(first)}
    own |= {token: at for at, token in enumerate(numbering.last, len(model.names) + offset)}
    added, special = _added(path, settings)
    if inside := sorted(set(added) - set(special) - set(own) - set(pieces)):
        raise NotRead(
            f"its tokenizer was given words of its own ({', '.join(inside[:5])}), which the model does not split"
        )
    lists = ("additional_special_tokens", "extra_special_tokens")
    listed = [token for name in lists for token in _names(settings.get(name))]
    if numbering.language and (lost := sorted({*listed} - {*own, *pieces, *added})):
        raise NotRead(f"it does not contain the ids of {', '.join(lost[:5])}")
    rows = config.get("vocab_size")
    fits = {token: at for token, at in own.items() if type(rows) is not int or at < rows}  # unused ones may be cut off
    vocabulary = {**pieces, **fits, **added}
    unknown = "<unk>" if "<unk>" in first else model.unknown
    inner = Pieces(model.content, vocabulary, sorted({*own, *special, *model.hidden}), unknown)
    side = TextTokenizer.from_inner(inner, skips_special=True, spaces="all")
    eos = _of(vocabulary, "</s>", path)
    if not numbering.language:
        return FolderPieces(side, side, (), (eos,))
    spoken = _language(vocabulary, settings, language, path)
    before, after = ((spoken,), (eos,)) if numbering.language == "before" else ((), (eos, spoken))
    return FolderPieces(side, side, before, after)


def _usual(model_type: str, model: PieceModel, config: Mapping[str, Any]) -> str:
    """The usual tokenizer class, for a folder that names none."""
    if model_type != "mbart":
        usual = {"t5": "T5Tokenizer", "mt5": "T5Tokenizer", "pegasus": "PegasusTokenizer", "m2m_100": "NllbTokenizer"}
        return usual.get(model_type, f"of {model_type}")
    sizes = {
        len(model.names) + 2 + len(languages.split()): name
        for languages, name in ((_MBART_LANGUAGES, "MBartTokenizer"), (_MBART_50_LANGUAGES, "MBart50Tokenizer"))
    }
    rows = config.get("vocab_size")
    if type(rows) is not int or rows not in sizes:
        raise NotRead("it names no tokenizer_class, and neither mBART nor mBART-50 has so many tokens")
    return sizes[rows]


def _count(settings: Mapping[str, Any], name: str, usual: int) -> int:
    value = settings.get(name, usual)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise TokenizerError(f"tokenizer_config.json has {name} {value!r}, not a number up to {_MOST}. {_COMPLETE}")
    return value


def _names(value: Any) -> list[str]:
    """The names of one or several tokens, which are strings or records with a content."""
    several = list(value.values()) if isinstance(value, dict) and "content" not in value else value
    tokens: list[Any] = several if isinstance(several, list) else [several]
    contents = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [content for content in contents if isinstance(content, str)]


# --- models whose pieces are looked up in vocab.json


def _looked_up(path: Path, vocabulary: Mapping[str, int]) -> TextTokenizer:
    special = [token for token in vocabulary if token in _FAIRSEQ or _is_language(token)]
    pieces = Pieces(PieceModel.bytes_of(path), vocabulary, special)
    return TextTokenizer.from_inner(pieces, skips_special=True, spaces="between")


def _is_language(token: str) -> bool:
    return (token.startswith("__") and token.endswith("__")) or (token.startswith(">>") and token.endswith("<<"))


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(path)
    if not vocabulary or not all(map(_is_id, vocabulary.values())) or "<unk>" not in vocabulary:
        raise TokenizerError(f"{path} is not a vocabulary of words and ids with <unk>. {_COMPLETE}")
    return vocabulary


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _with_languages(vocabulary: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, int]:
    """The vocabulary with the languages of M2M-100, if the model uses these languages."""
    if settings.get("language_codes", "m2m100") != "m2m100":
        return dict(vocabulary)
    languages = enumerate(_M2M_LANGUAGES.split(), len(vocabulary))
    return {**vocabulary, **{f"__{language}__": index for index, language in languages}}


# --- common parts


def _added(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The tokens added to the vocabulary, such as languages, with their ids, and the special tokens among them."""
    named = read_json(path / "special_tokens_map.json")
    special = [token for name in named for token in _names(named[name])]
    tokens = read_json(path / "added_tokens.json")
    try:
        for index, entry in settings.get("added_tokens_decoder", {}).items():
            tokens[entry["content"]] = int(index)
            special += [entry["content"]] * bool(entry.get("special"))
        if not all(isinstance(token, str) and _is_id(index) for token, index in tokens.items()):
            raise ValueError(next(index for index in tokens.values() if not _is_id(index)))
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise TokenizerError(
            f"the added tokens in {path} cannot be read: {error!r}. Save the tokenizer again."
        ) from error
    return tokens, special


def _language(vocabulary: Mapping[str, int], settings: Mapping[str, Any], chosen: str | None, path: Path) -> int:
    """The id of the source language."""
    name = chosen or settings.get("src_lang")
    if name is None:
        raise NotRead("it does not say the language of its sources", "Give --src-lang, such as en, en_XX or eng_Latn.")
    return language_id(vocabulary.get, str(name), path)


def language_id(id_of: Callable[[str], int | None], name: str, path: Path) -> int:
    """The id of a language by its name in the vocabulary: `deu_Latn`, `de_DE`, or `__de__` for de.

    Raises:
        ConfigError: the vocabulary lacks the language.
    """
    for token in (name, f"__{name}__"):
        if (number := id_of(token)) is not None:
            return int(number)
    raise ConfigError(f"the vocabulary in {path} has no language {name!r}. Give it in the vocabulary's spelling.")


def _of(vocabulary: Mapping[str, int], token: str, path: Path) -> int:
    if token not in vocabulary:
        raise TokenizerError(f"the vocabulary in {path} has no {token}. {_COMPLETE}")
    return vocabulary[token]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing.

    Raises:
        TokenizerError: the file cannot be read, or has another value.
    """
    return json_object(path, TokenizerError) if path.is_file() else {}
