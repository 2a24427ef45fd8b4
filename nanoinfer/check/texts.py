"""What a checkpoint is compared on: texts in several languages and in code, awkward spaces, and chats."""

# ruff: noqa: RUF001 - other languages have letters that look like ours
from __future__ import annotations

from typing import Any

TEXTS = {
    "English": "The Moon turns once while it goes around the Earth once. So we always see the same half of it. The"
    " other half was first photographed by a spacecraft in 1959.",
    "German": "Die Elbe entspringt im Riesengebirge und mündet bei Cuxhaven in die Nordsee. Größere Städte an ihrem"
    " Ufer sind Dresden, Magdeburg und Hamburg.",
    "French": "Le plus long fleuve de France est la Loire. Elle naît au mont Gerbier-de-Jonc, passe par Orléans et se"
    " jette dans l'océan Atlantique.",
    "Spanish": "El agua hierve a cien grados al nivel del mar. ¿Por qué hierve antes en la montaña? Porque allí la"
    " presión del aire es más baja.",
    "Russian": "Байкал — самое глубокое озеро мира. Зимой его поверхность замерзает, а весной лёд тает лишь в мае.",
    "Greek": "Ένα τρίγωνο έχει τρεις γωνίες, και το άθροισμά τους είναι δύο ορθές.",
    "Chinese": "一年有四个季节：春天、夏天、秋天和冬天。北半球的夏天，正是南半球的冬天。",
    "Japanese": "富士山は日本で一番高い山です。晴れた日には、東京からも見えることがあります。",
    "Korean": "물은 섭씨 영도에서 얼고, 얼음은 물보다 가볍다. 그래서 얼음은 물 위에 뜬다.",
    "Arabic": "النيل نهر طويل في أفريقيا، ويصب في البحر المتوسط قرب مدينة الإسكندرية.",
    "Hebrew": "בשבוע יש שבעה ימים, וביממה יש עשרים וארבע שעות.",
    "Hindi": "सूर्य पूर्व में उगता है और पश्चिम में डूबता है। एक वर्ष में बारह महीने होते हैं।",
    "Thai": "หนึ่งปีมีสิบสองเดือน และหนึ่งสัปดาห์มีเจ็ดวัน",
    "Python": "def primes(limit: int) -> list[int]:\n    found = []\n    for number in range(2, limit):\n"
    "        if all(number % prime for prime in found):\n            found.append(number)\n    return found\n",
    "C": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 10; i > 0; i--)\n"
    '\t\tprintf("%d\\n", i * i);\n\treturn 0;\n}\n',
}
AWKWARD = {
    "spaces": "  two before, two  between, one behind ",
    "line breaks": "one\ntwo\n\n\nfive\r\nsix\n",
    "tabs": "\ta\tb\t\tc\n\t\td",
    "rare spaces": "a\u00a0b\u2003c\u200bd\u3000e",
    "emoji": "👍\U0001f3fd 👩\u200d👧 🏳\ufe0f\u200d🌈 🇫🇷 ☕\ufe0f 🤷\U0001f3fb\u200d♂\ufe0f",
    "accents": "é e\u0301 ñ n\u0303 Å A\u030a ﬁ",
    "numbers": "0 00 1234567 3.14159 \u22121 ½ x² ≤ √2 10⁻³",
    "rare characters": "\U0001d518\U0001d52b 𐍈 𠮷 \u202eabc\u202c \ufffd",
    "JSON": '{"name": "Ada\\n", "list": [1, 2.5e-3, null, true], "é": "\\u00e9"}',
}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "Get the time of the next high tide.",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string", "description": "the port's name"}},
            "required": ["port"],
        },
    },
}
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_tide", "arguments": {"port": "Brest"}},
}


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED = _said("user", "When is high tide in Brest?")
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {  # messages, and arguments of the template
    "one question": ([ASKED], {}),
    "a system message": ([_said("system", "Answer in one sentence. "), ASKED], {}),
    "several turns": ([ASKED, _said("assistant", "At noon.\n"), _said("user", "  And\n\ntomorrow? 🌊")], {}),
    "tools": ([ASKED], {"tools": [TOOL]}),
    "a tool's answer": (
        [
            ASKED,
            _said("assistant", "", tool_calls=[CALL]),
            _said("tool", "12:04", name="get_tide", tool_call_id=CALL["id"]),
        ],
        {"tools": [TOOL]},
    ),
    "a prefilled answer": (
        [ASKED, _said("assistant", "High tide is at")],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}
