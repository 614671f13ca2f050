"""Properties of a reply's style, written by someone who had seen neither the measures of the taste model nor
the other properties. A taste drawn from them is a stranger's."""

import itertools
import math
import re
import statistics
from collections.abc import Callable

_WORD = re.compile(r"[A-Za-z]+(?:['\u2019][A-Za-z]+)*")


def _plain(text: str) -> str:
    """Text without code fences, list markers, heading marks and emphasis marks."""
    t = re.sub(r"```.*?(?:```|\Z)", " ", text, flags=re.S)
    t = re.sub(r"(?m)^\s*(?:[-*+\u2022]|\d+[.)])\s+", "", t)
    t = re.sub(r"(?m)^\s*(?:#{1,6}|>)\s*", "", t)
    return re.sub(r"\*+|`|(?<!\w)_+|_+(?!\w)", "", t)


def _words(text: str) -> list[str]:
    return [w.lower().replace("\u2019", "'") for w in _WORD.findall(_plain(text))]


def _sentences(text: str) -> list[str]:
    t = re.sub(r"\b(e\.g|i\.e|etc|vs|Mr|Mrs|Ms|Dr)\.", lambda m: m.group(1).replace(".", ""), _plain(text))
    parts = re.split(r"(?<=[.!?])[\"')\u201d\u2019]*\s+|\n+", t)
    return [p.strip() for p in parts if _WORD.search(p)]


def _alt(phrases: list[str]) -> re.Pattern:
    body = "|".join(re.escape(p) for p in sorted(phrases, key=len, reverse=True))
    return re.compile(r"(?<![\w'])(?:" + body + r")(?![\w'])", re.I)


def _per100(n: float, text: str) -> float:
    w = len(_words(text))
    return 100.0 * n / w if w else 0.0


def _norm(text: str) -> str:
    return re.sub(r"\s+", " ", _plain(text).replace("\u2019", "'"))


def _set_of(words: str) -> set[str]:
    return set(words.split())


_STOP = _set_of(
    """
a an the and or but if then than so as at by for from in into of off on onto out over to up with
without about is are was were be been being am do does did done have has had having i you he she it
we they me him her us them my your his its our their this that these those there here what which who
whom whose when where why how not no nor can could will would shall should may might must just also
very too more most some any all each other don't doesn't isn't it's you're i'm that's can't i've
you've let's
    """
)

# 1 -------------------------------------------------------------------------
_HEDGE = _alt(
    """maybe|perhaps|possibly|probably|might|may|could|seems|seem|appears|likely|unlikely|generally|
usually|typically|often|sometimes|tend to|tends to|in general|in many cases|in some cases|it depends|
depending on|
depends on|somewhat|relatively|fairly|roughly|approximately|arguably|i think|i believe|i'd guess|
as far as i know|
not necessarily|can vary|varies|potentially|presumably|to some extent|in most cases""".replace(
        "\n", ""
    ).split("|")
)


def hedging(question: str, text: str) -> float:
    """Hedges per 100 words."""
    return _per100(len(_HEDGE.findall(_norm(text))), text)


# 2 -------------------------------------------------------------------------
_FLAT = re.compile(
    r"\b(?:(?:great|good|excellent|wonderful|fantastic|interesting|smart|thoughtful|lovely|awesome) "
    r"(?:question|choice|idea|point|thinking|instinct|start|goal)|you're (?:absolutely )?right|"
    r"absolutely|of course|certainly|sure(?: thing)?|happy to help|glad you asked|i'd be happy|"
    r"i'd love to|no problem|definitely|thanks for|thank you for)\b",
    re.I,
)


def sycophantic_opening(question: str, text: str) -> float:
    """Weight of flattery and service noises in the opening: earlier marks count more."""
    head = _norm(text).strip()[:200]
    s = sum(1.0 - m.start() / 250.0 for m in _FLAT.finditer(head))
    first = _sentences(text)[:1]
    return s + (0.5 if first and "!" in first[0] else 0.0)


# 3 -------------------------------------------------------------------------
def delayed_answer(question: str, text: str) -> float:
    """Share of the opening's content words (two sentences) that only echo the question, plus a sum for
    throat-clearing."""
    sents = [" ".join(_sentences(text)[:2])] if _sentences(text) else []
    if not sents:
        return 0.0
    q = {w[:5] for w in _words(question) if w not in _STOP}
    c = [w for w in _words(sents[0]) if w not in _STOP]
    echo = sum(w[:5] in q for w in c) / len(c) if c else 0.0
    clear = re.search(
        r"\b(?:when it comes to|there (?:are|is) (?:many|several|a few|a number|various|no single)|"
        r"in today's|it's important|let's (?:dive|explore|break|look)|here(?:'s| are| is)|below|"
        r"the following|can be (?:an? )?(?:\w+ )?(?:challeng|tricky|difficult|daunting|overwhelm))",
        _norm(sents[0]),
        re.I,
    )
    return echo + (0.75 if clear else 0.0)


# 4 -------------------------------------------------------------------------
_CLOSE = re.compile(
    r"let me know|feel free|hope (?:this|that|it) helps|if you(?:'d| would)? (?:like|want|need|have|"
    r"share|tell)|happy to|would you like|want me to|do you want|good luck|don't hesitate|i can also|"
    r"just ask|any (?:other|more|further) questions|enjoy|you(?:'ve| have)? got this|"
    r"in (?:summary|conclusion|short)|overall|ultimately|remember",
    re.I,
)


def closing_ceremony(question: str, text: str) -> float:
    """Offers, well-wishes, recaps and questions in the last two sentences."""
    tail = _sentences(text)[-2:]
    s = sum(len(_CLOSE.findall(_norm(x))) for x in tail)
    return float(s) + (1.0 if tail and tail[-1].rstrip().endswith("?") else 0.0)


# 5 -------------------------------------------------------------------------
def rhythm_variation(question: str, text: str) -> float:
    """Mean absolute log ratio between the lengths of neighbouring sentences (choppy/long alternation)."""
    n = [len(_words(s)) for s in _sentences(text)]
    n = [x for x in n if x]
    if len(n) < 2:
        return 0.0
    return statistics.fmean(abs(math.log(b / a)) for a, b in itertools.pairwise(n))


# 6 -------------------------------------------------------------------------
def scaffolding(question: str, text: str) -> float:
    """Share of non-blank lines that are list items or headings, plus a bit for each bold run."""
    lines = [x for x in text.splitlines() if x.strip()]
    if not lines:
        return 0.0
    k = sum(
        bool(
            re.match(r"\s*(?:[-*+\u2022]\s|\d+[.)]\s|#{1,6}\s|\|)", x)
            or re.match(r"\s*\*\*[^*]+\*\*:?\s*$", x)
        )
        for x in lines
    )
    bold = len(re.findall(r"\*\*[^*\n]+\*\*|__[^_\n]+__", text))
    return k / len(lines) + 0.1 * bold


# 7 -------------------------------------------------------------------------
_BUZZ = re.compile(
    r"\b(?:delv\w+|leverag\w+|robust\w*|crucial\w*|pivotal|essential\w*|vital|seamless\w*|foster\w*|"
    r"enhanc\w+|comprehensive\w*|holistic\w*|landscape|tapestry|realm|journey|navigat\w+|unlock\w*|"
    r"empower\w*|elevat\w+|vibrant|nuanced?|multifaceted|intricate\w*|underscor\w+|showcas\w+|"
    r"streamlin\w+|optimi[sz]\w+|utili[sz]\w+|facilitat\w+|cultivat\w+|testament|game[- ]changer|"
    r"ensur\w+|transformative|innovative|meaningful\w*|key|impactful|embrac\w+|harness\w*|"
    r"boost\w*|dynamic|curated?|insights?|tailored|significant\w*|incredibl[ey]|truly)\b",
    re.I,
)


def assistant_cliche(question: str, text: str) -> float:
    """Inflated 'AI' diction, set phrases such as 'not just X but Y' counted double, per 100 words."""
    t = _norm(text)
    frames = len(
        re.findall(
            r"not (?:just|only|merely)\b[^.!?]{1,60}?\b(?:but|it's)|isn't (?:just )?about|"
            r"whether you're|it's (?:important|worth|essential) (?:to|noting)|plays? an? \w+ role|"
            r"a wide range|at the end of the day",
            t,
            re.I,
        )
    )
    return _per100(len(_BUZZ.findall(t)) + 2 * frames, text)


# 8 -------------------------------------------------------------------------
_UNITS = re.compile(
    r"\b(?:minutes?|hours?|seconds?|days?|weeks?|months?|years?|percent|degrees?|miles?|km|cm|mm|kg|"
    r"grams?|lbs?|pounds?|inch(?:es)?|feet|cups?|tbsp|tsp|tablespoons?|teaspoons?|dollars|euros)\b",
    re.I,
)


def concreteness(question: str, text: str) -> float:
    """Numbers, units, mid-sentence proper names, quoted or code terms, and examples, per 100 words."""
    body = re.sub(r"(?m)^\s*\d+[.)]\s+", "", text)
    n = len(re.findall(r"[$\u20ac\u00a3]?\d[\d,.:/]*%?", body)) + 0.5 * len(_UNITS.findall(body))
    n += len(re.findall(r"(?<=[a-z,;] )(?!I\b)[A-Z][A-Za-z]+", _plain(text)))
    n += len(re.findall(r"`[^`\n]+`|[\"\u201c][^\"\u201c\u201d\n]{2,80}[\"\u201d]", body))
    n += len(
        re.findall(r"\b(?:for example|for instance|such as|e\.g\.|say,|imagine|picture this)", body, re.I)
    )
    return _per100(n, text)


# 9 -------------------------------------------------------------------------
_WARM = _alt(
    """sorry|understand|understandable|feel|feels|feeling|feelings|tough|hard|frustrating|stressful|
overwhelming|normal|okay|kind|gentle|gently|proud|worry|don't worry|comfort|comfortable|support|care|caring|
take your time|be patient|you're not alone|makes sense|that's okay|you can do|congratulations|love|lovely|
wonderful|happy|glad|hope|enjoy|excited|exciting|brave|heart|together|easy on yourself|kudos|fun|welcome|
trust""".replace("\n", "").split("|")
)


def warmth(question: str, text: str) -> float:
    """Empathy and encouragement words per 100 words, plus exclamations and emoji at half weight."""
    t = _norm(text)
    n = len(_WARM.findall(t)) + 0.5 * t.count("!")
    n += 0.5 * len(re.findall(r"[\U0001F300-\U0001FAFF\u2600-\u27BF]", text))
    return _per100(n, text)


# 10 ------------------------------------------------------------------------
_IMP = _set_of(
    """
add aim allow apply ask avoid be begin boil bring build buy call change check choose clean click
combine compare consider cook cover create cut decide do don't drain drink eat enjoy ensure explain
find focus follow get give go heat hold keep learn leave let limit list look make measure mix move
never note open pay pick place plan practice prepare press put read remember remove replace review
rinse run save schedule search season see select serve set share show simmer skip sleep start stay
stick stir stop store swap take talk tell test think track treat try turn use visit wait walk wash
watch wear work write
    """
)


def commanding(question: str, text: str) -> float:
    """Share of sentences that command: imperative openings, or 'you should/must/need to'."""
    s = _sentences(text)
    if not s:
        return 0.0
    k = 0.0
    for x in s:
        x = re.sub(r"^[^:.!?]{1,40}:\s+", "", x)
        w = _words(x)
        while w and w[0] in {
            "then",
            "first",
            "next",
            "also",
            "finally",
            "and",
            "just",
            "simply",
            "always",
            "please",
            "second",
            "third",
            "instead",
            "so",
            "now",
        }:
            w = w[1:]
        if w and w[0] in _IMP and not x.rstrip().endswith("?"):
            k += 1
        elif re.search(r"\byou(?:'ll)? (?:should|must|need to|have to|want to|ought to)\b", _norm(x), re.I):
            k += 0.7
    return k / len(s)


# 11 ------------------------------------------------------------------------
_CASUAL = _alt(
    """yeah|yep|nope|hey|hi|ok|okay|kinda|sorta|gonna|wanna|gotta|stuff|things|thing|guy|guys|pretty|
really|super|totally|basically|honestly|actually|just|a lot|lots|tons|bunch|a bit|cool|awesome|big|huge|crazy|
weird|folks|well|anyway|like|got|get|gets|sure|no big deal|mess with|figure out|plus|nice|handy|go for|
check out""".replace("\n", "").split("|")
)
_FORMAL = _alt(
    """however|therefore|furthermore|moreover|additionally|consequently|thus|hence|regarding|
in order to|prior to|subsequently|nevertheless|whereas|individuals|numerous|obtain|require|requires|
provide|provides|
commence|sufficient|assist|demonstrate|indicate|recommended|advisable|appropriate|upon|within|such as|
respectively|
including|primarily|particularly|due to|as well as""".replace("\n", "").split("|")
)


def casual_register(question: str, text: str) -> float:
    """(Contractions + casual words - formal words) per 100 words; may be negative."""
    t = _norm(text)
    c = len(
        re.findall(
            r"\b\w+(?:n't|'(?:re|ve|ll|d|m))\b|\b(?:it|that|there|here|what|let|he|she|who)'s\b", t, re.I
        )
    )
    return _per100(c + len(_CASUAL.findall(t)) - len(_FORMAL.findall(t)), text)


# 12 ------------------------------------------------------------------------
def interruptive_punctuation(question: str, text: str) -> float:
    """Dashes, parentheses, semicolons, mid-sentence colons and ellipses per 100 words."""
    t = _plain(text)
    n = len(re.findall(r"\s*\u2014\s*|\s\u2013\s|\s--?\s|\w--\w", t))
    n += t.count("(") + t.count(";") + len(re.findall(r"\.\.\.|\u2026", t))
    n += 0.5 * len(re.findall(r":(?= \w)", t))
    return _per100(n, text)


# 13 ------------------------------------------------------------------------
_SENSE = _alt(
    """bright|dark|soft|warm|cold|hot|cool|crisp|crunchy|sweet|salty|bitter|sour|sharp|smooth|rough|loud|
quiet|golden|red|blue|green|white|black|wet|dry|sticky|fresh|smell|taste|touch|sound|glow|heavy|light|
thick|thin|
hand|hands|eyes|skin|water|fire|stone|tree|sun|rain|wind|river|door|house|road|bread|knife|table|
window""".replace("\n", "").split("|")
)


def figurative_imagery(question: str, text: str) -> float:
    """Similes and analogies (double weight) and sensory words, per 100 words."""
    t = _norm(text)
    sim = len(
        re.findall(
            r"\b(?:is|are|it's|works?|acts?|looks?|feels?|just|much|a bit|sort of|kind of) like (?:an?|the|"
            r"your|having|being)\b|\bas \w+ as an?\b|\bas if\b|\bthink of (?:it|this|them|\w+ \w+) as\b|"
            r"\bimagine\b|\bpicture\b|\bthe way an?\b|\banalog\w+|\bakin to\b",
            t,
            re.I,
        )
    )
    return _per100(2 * sim + len(_SENSE.findall(t)), text)


# 14 ------------------------------------------------------------------------
_WHY = _alt(
    """because|since|so that|therefore|which means|that means|this means|as a result|due to|the reason|
that's why|this is why|causes|cause|leads to|lead to|makes it|so it|so you|so they|thanks to|in turn|
otherwise|
if|unless|but|although|though|while|whereas|however|instead|rather than|on the other hand|even if|trade-off|
tradeoff|downside|despite|yet|except""".replace("\n", "").split("|")
)


def reasoned_connection(question: str, text: str) -> float:
    """Causal, conditional and contrastive connectives per sentence: argues rather than lists."""
    s = _sentences(text)
    return len(_WHY.findall(_norm(text))) / len(s) if s else 0.0


# 15 ------------------------------------------------------------------------
def lexical_difficulty(question: str, text: str) -> float:
    """Mean syllable estimate of the content words that the user did not use in the question."""
    q = set(_words(question))
    c = [w for w in _words(text) if w not in _STOP and w not in q]
    if not c:
        return 0.0

    def syl(w: str) -> int:
        w = re.sub(r"(?:[^laeiouy]es|[^dt]ed|[^l]e)$", "", w) or w
        return max(1, len(re.findall(r"[aeiouy]+", w)))

    return statistics.fmean(syl(w) for w in c)


# 16 ------------------------------------------------------------------------
def own_voice(question: str, text: str) -> float:
    """Takes a stand as an 'I': first-person words and verdicts ('the best', 'I'd skip'), minus balance
    talk, per 100 words."""
    t = _norm(text)
    i = len(re.findall(r"\bI(?:'d|'m|'ve|'ll)?\b|\b(?:my|me)\b(?! know)", t))
    v = len(
        re.findall(
            r"\b(?:the best|the worst|the only|worth it|not worth|don't bother|overrated|underrated|"
            r"my (?:favou?rite|pick|advice)|i'd|recommend|better|clearly|never|always|skip|wrong|terrible|"
            r"beats|the real|simply)\b",
            t,
            re.I,
        )
    )
    b = len(
        re.findall(
            r"\b(?:both|it depends|depends on|personal preference|on the other hand|some people|others|"
            r"pros and cons|up to you|consult|everyone(?:'s)? (?:is )?different|varies)\b",
            t,
            re.I,
        )
    )
    return _per100(i + v - b, text)


PROPERTIES: dict[str, Callable[[str, str], float]] = {
    "hedging": hedging,
    "sycophantic_opening": sycophantic_opening,
    "delayed_answer": delayed_answer,
    "closing_ceremony": closing_ceremony,
    "rhythm_variation": rhythm_variation,
    "scaffolding": scaffolding,
    "assistant_cliche": assistant_cliche,
    "concreteness": concreteness,
    "warmth": warmth,
    "commanding": commanding,
    "casual_register": casual_register,
    "interruptive_punctuation": interruptive_punctuation,
    "figurative_imagery": figurative_imagery,
    "reasoned_connection": reasoned_connection,
    "lexical_difficulty": lexical_difficulty,
    "own_voice": own_voice,
}
