"""Generate from a few prompts: with the bundled model, or with --model PATH_OR_HUB_ID."""

from __future__ import annotations

import argparse

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams

SHAKESPEARE = [
    "ROMEO:\nBut, soft! what light",
    "GLOUCESTER:\nNow is the winter",
    "JULIET:\nO Romeo, Romeo!",
]
QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    """Print each prompt and the text that the model generates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled", help="folder or Hub id (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--stats", action="store_true", help="print in the end what the LLM has done")
    args = parser.parse_args()

    with LLM(args.model) as llm:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        if llm.config.model == BUNDLED_MODEL:
            prompts, outputs = SHAKESPEARE, llm.generate(SHAKESPEARE, params)
        elif llm.tokenizer is not None and llm.tokenizer.chat_template:
            chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
            prompts, outputs = QUESTIONS, llm.chat(chats, params)
        else:
            prompts, outputs = QUESTIONS, llm.generate(QUESTIONS, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"\n--- {prompt}\n{output['text']}")
        if args.stats:
            print(f"\n{llm.stats()}")


if __name__ == "__main__":
    main()
