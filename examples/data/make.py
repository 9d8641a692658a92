"""Writes captions.de, by a small grammar, and captions.en: its translation by the model that is embedded in tfexport."""

from pathlib import Path

import tfexport

ONE = (
    *("Ein Mann", "Eine Frau", "Ein Junge", "Ein kleiner Junge", "Ein Mädchen", "Ein Kind mit einem blauen Hut"),
    *("Ein brauner Hund", "Ein schwarzer Hund", "Eine ältere Dame", "Ein Radfahrer", "Ein Mann in einem roten Hemd"),
    *("Eine junge Frau", "Ein Mädchen in einem roten Kleid", "Eine Frau mit einer Brille"),
)
MANY = (
    *("Zwei Männer", "Zwei Frauen", "Drei Kinder", "Zwei Hunde", "Zwei kleine Mädchen", "Viele Menschen"),
    *("Drei Männer in weißen Hemden", "Zwei Jungen", "Mehrere Frauen", "Drei junge Männer"),
)
VERBS = {  # of one, and of many
    **{"spielt": "spielen", "läuft": "laufen", "sitzt": "sitzen", "springt": "springen", "steht": "stehen"},
    **{"geht": "gehen", "liegt": "liegen", "schläft": "schlafen", "rennt": "rennen", "wartet": "warten"},
}
PREDICATES = (
    *("spielt am Strand mit einem roten Ball", "läuft durch den Schnee", "sitzt auf einer Bank im Park"),
    *("springt über einen Zaun", "steht vor einem großen Gebäude", "geht eine Straße entlang", "liegt im Gras"),
    *("schläft auf einem Sofa", "rennt über eine Wiese", "spielt im Sand", "sitzt an einem Tisch", "steht im Wasser"),
    *("springt in einen See", "läuft durch eine Stadt", "wartet auf den Zug", "spielt mit einem Hund"),
)

folder = Path(__file__).parent
sentences = [f"{subject} {predicate}." for predicate in PREDICATES for subject in ONE]
for predicate in PREDICATES:
    verb, _, rest = predicate.partition(" ")
    sentences += [f"{subject} {VERBS[verb]} {rest}." for subject in MANY]
bundle = folder.parents[1] / "build" / "de-en"
tfexport.export(folder.parents[1] / "tfexport" / "assets" / "de-en.safetensors", bundle, force=True)
translations = tfexport.load(bundle).translate(sentences, beam=4)
for language, lines in (("de", sentences), ("en", map(str, translations))):
    (folder / f"captions.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
