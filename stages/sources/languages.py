"""Languages by one kind of name, ISO 639's two letters where it has them; a guess where nobody told."""

import re
from collections.abc import Sequence

UNKNOWN = "und"  # ISO 639's own for undetermined

# ISO 639-3 and 639-2 (both forms) and 639-1, of the languages that chat data sets come in.
_CODES = """
afr:af alb:sq amh:am ara:ar arb:ar arm:hy aze:az baq:eu bel:be ben:bn bos:bs bul:bg bur:my cat:ca ces:cs
chi:zh cmn:zh cym:cy cze:cs dan:da deu:de dut:nl ell:el eng:en epo:eo est:et eus:eu fas:fa fin:fi fra:fr
fre:fr fry:fy geo:ka ger:de gla:gd gle:ga glg:gl gre:el guj:gu hat:ht hau:ha heb:he hin:hi hrv:hr hun:hu
hye:hy ibo:ig ice:is ind:id isl:is ita:it jav:jv jpn:ja kan:kn kat:ka kaz:kk khm:km kin:rw kir:ky kor:ko
kur:ku lao:lo lat:la lav:lv lit:lt ltz:lb mac:mk mal:ml mar:mr may:ms mkd:mk mlg:mg mlt:mt mon:mn mri:mi
msa:ms mya:my nep:ne nld:nl nno:nn nob:nb nor:no nya:ny ori:or pan:pa pbt:ps per:fa pes:fa plt:mg pol:pl
por:pt pus:ps que:qu ron:ro rum:ro run:rn rus:ru sin:si slk:sk slo:sk slv:sl smo:sm sna:sn snd:sd som:so
sot:st spa:es sqi:sq srp:sr sun:su swa:sw swe:sv swh:sw tam:ta tat:tt tel:te tgk:tg tgl:tl tha:th tir:ti
tuk:tk tur:tr uig:ug ukr:uk urd:ur uzb:uz vie:vi wel:cy wol:wo xho:xh yid:yi yor:yo zho:zh zsm:ms zul:zu
"""
_TWO_LETTERS: dict[str, str] = dict(re.findall(r"(\w{3}):(\w{2})", _CODES))

# Words that hold a sentence together, of those languages that pass for typed here (see plausibility.py).
_COMMON = {language: frozenset(text.split()) for language, text in {
    "en": "the of to and is are was in what how why you my your me for that this with can i it be do does",
    "de": "der die das und ist sind ein eine einen nicht ich wie was zu mit für auf von im dem den wir mir",
    "es": "el la los las de que y en un una es por cómo qué para con del mi se su como está son cuál sobre",
    "fr": "le la les de des en et est un une que pour dans je vous quel quelle du au avec sur mon ma moi sil",
    "it": "il la gli di che un una per non come sono del della è mi con cosa perché lo nel questo su dei",
    "pt": "os de que um uma para não com é do da em meu minha como são por no na você sobre eu",
    "nl": "de het een en van is ik niet wat hoe mijn voor met zijn op dat je kan",
}.items()}


def code(name: str) -> str:
    """Return the two letters of a code in whatever form (deu, de-AT, deu_Latn); others as they are."""
    first = re.split(r"[-_]", name.strip().lower(), maxsplit=1)[0]
    return _TWO_LETTERS.get(first, first) if 2 <= len(first) <= 3 else name


def guess(found: Sequence[str]) -> str:
    """Return the language whose common words are most among a text's words; UNKNOWN if none or two are.

    One word is enough for English alone, in which nearly all is led to be written.
    """
    counts = {language: sum(word in common for word in found) for language, common in _COMMON.items()}
    best, second = sorted(counts, key=lambda language: -counts[language])[:2]
    least = max(counts[second] + 1, 1 + (best != "en"))
    return best if counts[best] >= least else UNKNOWN
