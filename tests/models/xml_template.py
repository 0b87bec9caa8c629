"""A chat template with tool calls in the manner of Qwen3-Coder: a tag for each argument."""

from __future__ import annotations

_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' }}
            {%- if value is string %}{{- value }}
            {%- elif value is mapping or value is sequence %}{{- value | tojson }}
            {%- else %}{{- value | SCALAR }}
            {%- endif %}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def xml_template(*, python_scalars: bool = False) -> str:
    """The template. python_scalars: booleans, numbers and null are written as Python's str writes them, as by Qwen3.5's
    template, instead of JSON."""
    return _TEMPLATE.replace("SCALAR", "string" if python_scalars else "tojson")
