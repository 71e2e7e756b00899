import datetime
import types

import pytest
from transformers import PreTrainedTokenizerFast

from specserve.models.hub import ModelError
from specserve.server.chat import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' '  + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- set ns = namespace(first=true) %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "<|eot_id|>" }}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- message.content | tojson(indent=2) }}{% continue %}{% endif %}
    {%- set ns.first = false %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages -%}
{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}
"""
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "llama3": LLAMA3, "gemma": GEMMA, "generation": GENERATION}

CHATS = {
    "one": [{"role": "user", "content": "  Wie geht's? <b>&\"é🙂</b>\n"}],
    "long": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b</s> "},
        {"role": "user", "content": "{{ c }}"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
    "turns": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
    "tool": [{"role": "user", "content": "x"}, {"role": "tool", "content": "<é>"}],
}


def outcome(render):
    try:
        return render()
    except Exception:
        return "refused"


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(sentencepiece_backend, template, chat):
    oracle = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_backend, bos_token="<s>", eos_token="</s>")
    expected = outcome(
        lambda: oracle.apply_chat_template(
            CHATS[chat], chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=True
        )
    )
    ours = ChatTemplate(TEMPLATES[template], {"bos_token": "<s>", "eos_token": "</s>"})
    assert outcome(lambda: ours.render(CHATS[chat])) == expected
    refused = {("llama2", "turns"), ("gemma", "system")}
    assert (expected == "refused") == ((template, chat) in refused)


def test_bos_is_there_once(sentencepiece_tokenizer):
    text = ChatTemplate(GEMMA, {"bos_token": "<s>"}).render(CHATS["one"])
    ids = sentencepiece_tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1 and ids.count(1) == 1


def test_the_demo_template(demo_tokenizer):
    template = ChatTemplate(demo_tokenizer.chat_template, demo_tokenizer.special_tokens)
    ids = demo_tokenizer.encode(template.render([{"role": "user", "content": "hi"}]), add_special_tokens=False)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_today_is_today():
    year = str(datetime.datetime.now().year)
    assert year in ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHATS["one"])


def refusal(template, messages):
    with pytest.raises(ValueError) as caught:
        ChatTemplate(template, {}).render(messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_messages_are_named():
    messages = [{"role": "user", "content": "x"}, {"role": "wizard", "content": "y"}]
    assert refusal(CHATML, messages) == (
        "chat.messages[1].role is 'wizard'; it must be one of system, user, assistant, tool"
    )
    assert "chat.messages[0].role is ''" in refusal(CHATML, [{"role": "", "content": "y"}])
    assert refusal(CHATML, []) == "chat.messages is empty; send at least one message"
    assert refusal(None, CHATS["one"]) == "chat: the model has no chat template; send text or token_ids instead"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_is_one_line(template, reason):
    message = refusal(template, CHATS["one"])
    assert message.startswith("chat.messages: the model's chat template refuses them: ") and reason in message


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ '{0.__class__.__base__}'.format(messages) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.f = ''.__class__ %}{{ ns.f.mro() }}",
    ],
)
def test_a_template_cannot_break_out(attack):
    # The sandbox makes what is forbidden undefined: that prints as nothing, and to use it is an error.
    text = outcome(lambda: ChatTemplate(attack, {}).render(CHATS["one"]))
    assert text in ("", "refused")


def test_any_mappings_will_do():
    message = types.MappingProxyType({"role": "user", "content": "é"})
    assert ChatTemplate("{{ messages | tojson }}", {}).render((message,)) == '[{"role": "user", "content": "é"}]'


@pytest.mark.parametrize(
    "change", ["messages[0].update({'role': 'y'})", "messages.append(1)", "messages[0].pop('role')"]
)
def test_messages_are_not_changed(change):
    messages = [{"role": "user", "content": "x"}]
    refusal("{% set _ = " + change + " %}", messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_that_is_no_template_is_a_model_error():
    with pytest.raises(ModelError, match="chat template is not valid: line 2: ") as caught:
        ChatTemplate("x\n{% for %}", {})
    assert "\n" not in str(caught.value)
