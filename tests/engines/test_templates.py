from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.templates import TemplateError, dangers, of_folder

CHATML = (
    "{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{%- set ns = namespace(last=messages|length - 1) %}"
    "{% for message in messages %}{% if loop.index0 > ns.last %}{% break %}{% endif %}"
    "{% if messages[loop.index0 - 1].role == message['role'] %}{{ raise_exception('twice') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'].split('</think>')[-1] | trim }}"
    "{% generation %}{{ message.tool_calls | map(attribute='function.name') | join }}{% endgeneration %}"
    "{% endfor %}{% macro show(x) %}{{ x ~ strftime_now('%d %b %Y') }}{% endmacro %}"
)


def test_an_honest_template_has_no_dangers() -> None:
    assert dangers(CHATML) == []


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages['__cl' ~ 'ass__'] }}",
        "{{ messages['%c%c' % (95, 95)] }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | attr('_' * 2 ~ 'class') }}",
        "{{ messages | attr(name) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | map(attribute='_secret') | list }}",
        "{{ lipsum }}",
        "{{ self }}",
        "{{ f.gi_frame.f_globals }}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
        "{% from 'other' import x %}",
        "{% extends 'other' %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(99999999) }}",
        "{{ messages | tojson(indent=99999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:>99999999}'.format(1) }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}",
        "{% set x = '_' * 2 ~ 'class' ~ '_' * 2 %}{{ ''[x] }}",
        "{{ messages[dict(__class__=1) | list | first] }}",
        "{{ messages['{}{}'.format('_', '_')] }}",
        "{{ messages['_'.replace('_', 'x')] }}",
        "{% set x %}{{ ''.__class__ }}{% endset %}",
        "{% for x in [].__class__.__base__.__subclasses__() %}{% endfor %}",
        "{% if",
        "{{ " + "(" * 5000,
        "x" * (2 << 20),
    ],
)
def test_a_template_that_reaches_out_is_refused(text: str) -> None:
    assert dangers(text)


def test_a_danger_names_its_line_and_what_it_is() -> None:
    assert dangers("{{ a }}\n\n{{ a.__class__ }}") == [
        "line 3: the attribute `__class__`, which leads out of the template"
    ]


def test_dangerous_words_in_plain_text_are_only_text() -> None:
    assert dangers("Never call __import__ or obj.__class__.") == []


def test_templates_are_found_wherever_transformers_finds_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    assert of_folder(tmp_path) == {"default": "a", "rag": "b", "tool_use": "c"}
    (tmp_path / "chat_template.jinja").write_text("d")
    assert of_folder(tmp_path)["default"] == "d"


@pytest.mark.parametrize("config", ["{", "[]", '{"chat_template": 1}', '{"chat_template": [{"name": 1}]}'])
def test_a_template_that_cannot_be_found_is_an_error(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        of_folder(tmp_path)
