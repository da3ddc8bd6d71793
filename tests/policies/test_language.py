# ruff: noqa: RUF001
from __future__ import annotations

import pytest

from policies.signals import SIGNALS
from policies.signals.language import ENDING, LANGUAGES, UNDETERMINED, build, language_of, shipped_words


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "Could you tell me which of these two contracts is better for a small shop?"),
        ("en", "Say hello in one short sentence."),
        ("en", "Tell me about the history of the lighthouse."),
        ("en", "Suggest three names for a bakery."),
        ("de", "Schreib mir bitte eine kurze Absage auf die Einladung zum Sommerfest."),
        ("fr", "Peux-tu résumer cet article en trois phrases pour mes collègues ?"),
        ("es", "¿Cómo puedo pedir una cita con el médico sin llamar por teléfono?"),
        ("pt", "Você pode explicar por que o preço da energia não para de subir?"),
        ("it", "Scrivi una lettera al padrone di casa perché la caldaia non funziona più."),
        ("nl", "Leg uit waarom de huur dit jaar zo veel hoger is dan het vorige jaar."),
        ("sv", "Kan du förklara varför jag inte har fått tillbaka mina pengar?"),
        ("fi", "Miksi kissa nukkuu niin paljon, ja mitä voin tehdä sen kanssa?"),
        ("pl", "Napisz proszę krótki list do szkoły, że córka jest chora."),
        ("cs", "Proč se cena elektřiny už nemůže vrátit na to, co byla dřív?"),
        ("hu", "Írj egy rövid levelet az iskolának, hogy a lányom nem tud menni."),
        ("ro", "Scrie o scrisoare către școală pentru că fiica mea este bolnavă și nu poate veni."),
        ("tr", "Bu yıl kira neden bu kadar yüksek, ve ben ne yapabilirim?"),
        ("vi", "Hãy viết cho tôi một bức thư ngắn gửi đến trường của con."),
        ("id", "Tolong tulis surat singkat untuk sekolah karena anak saya sakit dan tidak bisa datang."),
        ("sw", "Tafadhali andika barua fupi kwa shule kwamba mtoto wangu ni mgonjwa."),
        ("et", "Miks on elekter nii kallis ja mida ma saan selle vastu teha?"),
        ("lv", "Kāpēc elektrība ir tik dārga, un ko es varu darīt?"),
        ("lt", "Kodėl elektra yra tokia brangi ir ką aš galiu padaryti?"),
        ("cy", "Pam mae trydan mor ddrud a beth mae pobl yn gallu ei wneud?"),
        ("eu", "Zergatik da hain garestia argindarra eta zer egin dezaket?"),
        ("ru", "Объясни, почему электричество так подорожало и что с этим делать."),
        ("uk", "Поясни, чому електрика так подорожчала і що з цим робити."),
        ("bg", "Обясни защо токът е толкова скъп и какво може да се направи."),
        ("ar", "اشرح لي لماذا الكهرباء غالية هذا العام"),
        ("fa", "توضیح بده که چرا برق این قدر گران است"),
        ("ur", "مجھے بتائیں کہ بجلی اتنی مہنگی کیوں ہے"),
        ("hi", "मुझे समझाइए कि बिजली इतनी महंगी क्यों है"),
        ("mr", "वीज इतकी महाग का आहे ते मला सांगा"),
        ("el", "Γιατί είναι τόσο ακριβό το ρεύμα;"),
        ("he", "למה החשמל כל כך יקר?"),
        ("th", "ทำไมค่าไฟถึงแพงมาก"),
        ("ko", "전기 요금이 왜 이렇게 비싼가요?"),
        ("ja", "電気代はなぜこんなに高いのですか"),
        ("zh", "为什么今年的电费这么贵？"),
        ("bn", "বিদ্যুতের দাম এত বেশি কেন?"),
        ("gu", "વીજળી આટલી મોંઘી કેમ છે?"),
        ("ml", "വൈദ്യുതിക്ക് എന്താണ് ഇത്ര വില?"),
        ("my", "ဘာကြောင့် မီးခ ဈေးကြီးတာလဲ"),
    ],
)
def test_a_sentence_has_its_language(language: str, text: str) -> None:
    assert language_of(text) == language
    assert language in LANGUAGES


@pytest.mark.parametrize("text", ["", "42 + 17", "🎉", "xkcd", "f(x) = 6x^2", "\ud800", "\0", "𒀀𒀁"])
def test_what_has_no_language(text: str) -> None:
    assert language_of(text) == UNDETERMINED


def test_both_ends_of_a_long_text_are_read() -> None:
    filler = "0123456789 " * 1000
    assert language_of("Why is this so expensive, and what can I do about it? " + filler) == "en"
    assert language_of(filler + "Why is this so expensive, and what can I do about it?") == "en"


def test_what_can_be_said_is_what_the_file_has() -> None:
    scripts = shipped_words().values()
    told = {code for words in scripts for weights in words.words.values() for code, _ in weights}
    assert told < set(LANGUAGES)
    assert SIGNALS["language"].values == LANGUAGES


def test_words_are_built_from_lines() -> None:
    words = build(
        "# note\n[latin]\naa: one two two\nbb: two three\n[letters]\nbb: ñ\n[endings]\naa: ing12 ^x5\n"
    )["latin"]
    assert words.words == {
        "one": (("aa", 1.0),),
        "two": (("aa", 0.5), ("bb", 0.5)),
        "three": (("bb", 1.0),),
    }
    assert words.letters == {"ñ": ("bb",)}
    assert words.endings == {
        "ing": (("aa", pytest.approx(ENDING * 1.2)),),
        "^x": (("aa", pytest.approx(ENDING / 2)),),
    }
