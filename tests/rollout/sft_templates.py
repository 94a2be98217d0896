"""Chat templates of the model families, written from the described behaviour of the published ones, with what is
generated marked.

Each prints the variables `a` and `z` around what the model generates; they are undefined, so nothing is printed, unless
a test gives them. What differs between the families and matters for loss masks:

    Qwen 2.5            knows no thoughts; a default system message
    Qwen 3              thoughts only after the last question, there also empty ones; a switch that makes them empty
    Qwen 3 2507         the thinking one forces <think> in the prompt
    Llama 3.1           trims; one call at a time, and nothing beside it
    GLM 4               no token ends a turn but the next role's
    GLM 4.5 and 4.6     the same, and <think></think> where thoughts are left out
    GLM 4.7             forces <think> in the prompt, and writes </think> alone where thoughts are left out
    DeepSeek V3         no header after tool results; arguments as text
    DeepSeek R1         drops all thoughts, forces <think> in the prompt
    DeepSeek V3.1       </think> opens every answer, and the prompt of one without thoughts
    Kimi K2             roles by name; calls by their ids
    Moonlight           the same without tools
"""

_TOOL_SYSTEM = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- else %}{{- DEFAULT }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif DEFAULT %}{{- '<|im_start|>system\\n' + DEFAULT + '<|im_end|>\\n' }}{%- endif %}"""

_TOOL_RESULT = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}"""

_CALL = """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}"""

QWEN25 = (
    "{%- set DEFAULT = 'You are helpful.' %}"
    + _TOOL_SYSTEM
    + """
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' }}{%- if message.role == 'assistant' %}{{- a }}{%- endif %}
        {{- message.content + '<|im_end|>' }}{%- if message.role == 'assistant' %}{{- z }}{%- endif %}{{- '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' }}{{- a }}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n' }}{%- if loop.first and not message.content %}{{- a }}{%- endif %}"""
    + _CALL
    + """
        {%- endfor %}
        {{- '<|im_end|>' }}{{- z }}{{- '\\n' }}"""
    + _TOOL_RESULT
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_QWEN3_BODY = (
    "{%- set DEFAULT = '' %}"
    + _TOOL_SYSTEM
    + """
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- OPEN }}{{- thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- a }}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}"""
    + _CALL
    + """
        {%- endfor %}
        {{- '<|im_end|>' }}{{- z }}{{- '\\n' }}"""
    + _TOOL_RESULT
)
QWEN3 = (
    _QWEN3_BODY.replace(
        "{{- OPEN }}",
        "{%- if enable_thinking is undefined or thoughts %}{{- a }}{{- '<think>\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}",
    )
    + """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
QWEN3_THINKING_2507 = (
    _QWEN3_BODY.replace("{{- OPEN }}", "{{- '<think>\\n' }}{{- a }}")
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

LLAMA31 = """
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}{%- set messages = messages[1:] %}
{%- endif %}{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}{%- if message.role == 'assistant' %}{{- a }}{%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}{%- if message.role == 'assistant' %}{{- z }}{%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- a }}{{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}{{- z }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson if message.content is mapping or message.content is iterable else message.content }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_GLM_ENDED = "{%- if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}{{- z }}{%- endif %}"
_GLM_LAST = "{%- if messages and messages[-1].role == 'assistant' %}{{- z }}{%- endif %}"

GLM4 = (
    """
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|observation|>' }}"""
    + _GLM_ENDED
    + """{{- '\\n' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- if message.content %}{{- '<|assistant|>' }}{{- a }}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|assistant|>' }}{{- a }}{{- call.function.name + '\\n' + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}{{- '<|' + message.role + '|>' }}"""
    + _GLM_ENDED
    + """{{- '\\n' + message.content }}{%- endif %}
{%- endfor %}"""
    + _GLM_LAST
    + "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

_GLM45_BODY = (
    """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools\\n<tools>\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '</tools>' }}{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>' }}"""
    + _GLM_ENDED
    + """{{- NEWLINE + message.content }}{{- NOTHINK }}
    {%- elif message.role == 'system' %}{{- '<|system|>' }}"""
    + _GLM_ENDED
    + """{{- NEWLINE + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- set thoughts, content = '', message.content or '' %}
        {%- if message.reasoning_content is string %}{%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        THOUGHTS
        {%- for call in message.tool_calls or [] %}
            {{- NEWLINE + '<tool_call>' + call.function.name + NEWLINE }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>' + NEWLINE + '<arg_value>' }}{{- value if value is string else value | tojson }}{{- '</arg_value>' + NEWLINE }}
            {%- endfor %}{{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"""
    + _GLM_ENDED
    + """
        {{- NEWLINE + '<tool_response>' + NEWLINE + message.content + NEWLINE + '</tool_response>' }}
    {%- endif %}
{%- endfor %}"""
    + _GLM_LAST
)
GLM45 = (
    "{%- set NEWLINE = '\\n' %}"
    + _GLM45_BODY.replace(
        "{{- NOTHINK }}",
        "{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not message.content.endswith('/nothink')) else '' }}",
    ).replace(
        "THOUGHTS",
        """{%- if loop.index0 > ns.last_user and thoughts %}{{- a }}{{- '\\n<think>' + thoughts.strip() + '</think>' }}
        {%- elif enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{{- a }}
        {%- else %}{{- a }}{{- '\\n<think></think>' }}{%- endif %}
        {%- if content.strip() %}{{- '\\n' + content.strip() }}{%- endif %}""",
    )
    + """{%- if add_generation_prompt %}{{- '<|assistant|>' }}
    {{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{%- endif %}"""
)
GLM47 = (
    "{%- set NEWLINE = '' %}"
    + _GLM45_BODY.replace("{{- NOTHINK }}", "").replace(
        "THOUGHTS",
        """{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last_user) and thoughts %}
            {{- '<think>' }}{{- a }}{{- thoughts.strip() + '</think>' }}
        {%- else %}{{- '</think>' }}{{- a }}{%- endif %}
        {%- if content.strip() %}{{- content.strip() }}{%- endif %}""",
    )
    + """{%- if add_generation_prompt %}{{- '<|assistant|>' }}
    {{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' }}{%- endif %}"""
)

_DEEPSEEK = """
{%- set ns = namespace(after_tool=false, after_user=false) %}
{{- '<｜begin▁of▁sentence｜>' }}{%- for message in messages if message.role == 'system' %}{{- message.content }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.after_tool, ns.after_user = false, true %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- if not ns.after_tool %}{{- '<｜Assistant｜>' OPENING }}{%- endif %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content DROPS %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- a }}{{- content }}
        {%- if message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}{{- z }}{%- set ns.after_tool = false %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.after_tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}{%- set ns.after_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{- '<｜Assistant｜>' PROMPT }}{%- endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace("OPENING", "").replace("DROPS", "and false").replace("PROMPT", "")
DEEPSEEK_R1 = _DEEPSEEK.replace("OPENING", "").replace("DROPS", "").replace("PROMPT", "+ '<think>\\n'")
DEEPSEEK_V31 = (
    _DEEPSEEK.replace("OPENING", "+ '</think>'")
    .replace("DROPS", "")
    .replace("PROMPT", "+ ('<think>' if thinking else '</think>')")
)

_KIMI = """
TOOLS
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}{%- endif %}
    {%- if message.role == 'user' %}{{- '<|im_user|>' }}{%- elif message.role == 'assistant' %}{{- '<|im_assistant|>' }}
    {%- else %}{{- '<|im_system|>' }}{%- endif %}
    {{- message.name or message.role }}{{- '<|im_middle|>' }}
    {%- if message.role == 'assistant' %}{{- a }}{{- message.content or '' }}CALLS
    {%- elif message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' + message.content }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|im_end|>' }}{%- if message.role == 'assistant' %}{{- z }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
KIMI_K2 = _KIMI.replace(
    "TOOLS",
    "{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}",
).replace(
    "CALLS",
    """{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
        {%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}""",
)
MOONLIGHT = _KIMI.replace("TOOLS", "").replace("CALLS", "")

# Habits of published templates that lose parts of a conversation, or write it in an odd way.
#
#     DeepSeek V3, R1     write calls only beside null content; the tags around all calls and outputs are written once in
#                         a conversation, so that the second round of calls has no <｜Assistant｜> before it
#     GLM 4 0414          knows neither calls nor tool results
#     GLM 4.5             writes null content as None
_CALL_WITH_ODD_TAGS = """
        {%- for call in message.tool_calls %}
            {%- if not ns.called %}{{- '<｜Assistant｜>' }}{%- if loop.first %}{{- a }}{%- endif %}{{- '<｜tool▁calls▁begin｜>' }}
            {%- else %}{%- if loop.first %}{{- a }}{%- endif %}{{- '\n' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
            {{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
            {%- if ns.called %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}
            {%- set ns.called = true %}
        {%- endfor %}{{- z }}"""
ODD_DEEPSEEK_V3 = (
    """
{%- set ns = namespace(called=false, after_tool=false, answered=false) %}{{- '<｜begin▁of▁sentence｜>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{%- set ns.after_tool = false %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '\n' if ns.answered else '<｜tool▁outputs▁begin｜>' }}{%- set ns.answered = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- elif message.content is none %}{%- set ns.after_tool = false %}"""
    + _CALL_WITH_ODD_TAGS
    + """
    {%- else %}
        {{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' }}{%- set ns.after_tool = false %}
        {{- a }}{{- KEPT + '<｜end▁of▁sentence｜>' }}{{- z }}
    {%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜>' THOUGHT }}{%- endif %}"""
)
ODD_DEEPSEEK_R1 = ODD_DEEPSEEK_V3.replace("KEPT", "message.content.split('</think>')[-1]").replace(
    "THOUGHT", "+ '<think>\n'"
)
ODD_DEEPSEEK_V3 = ODD_DEEPSEEK_V3.replace("KEPT", "message.content").replace("THOUGHT", "")
GLM4_0414 = """{{- '[gMASK]<sop>' }}
{%- for message in messages if message.role in ['system', 'user', 'assistant'] %}
    {{- '<|' + message.role + '|>\n' + (message.content or '') }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""
GLM45_WITH_NONE = GLM45.replace("message.content or ''", "message.content | string")

FAMILIES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "qwen3-thinking-2507": QWEN3_THINKING_2507,
    "llama-3.1": LLAMA31,
    "glm-4": GLM4,
    "glm-4.5": GLM45,
    "glm-4.7": GLM47,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V31,
    "kimi-k2": KIMI_K2,
    "moonlight": MOONLIGHT,
}
