"""Open questions, as people ask an assistant."""

from __future__ import annotations

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer
from specdec.types import StoppingParams

MAX_TOKENS = 160
QUESTIONS = (
    "Explain how a binary search works, as if I had never programmed before.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "I have a job interview on Monday and I am nervous. What should I do this weekend to prepare?",
    "List ten things to see in Rome, with one sentence about each.",
    "A train leaves at 9:40 and arrives at 13:05. It stops for 35 minutes on the way. How long does it move?",
    "What is the difference between a process and a thread, and when would you use which?",
    "Write a polite e-mail to my landlord: the heating has been broken for four days.",
    "Why is the sky blue, but red in the evening?",
    "Compare renting and buying a flat for somebody who may move in five years.",
    "Give me a week's plan of vegetarian dinners that take less than half an hour.",
    "Write a poem of three stanzas about the first snow in a big city.",
    "How do vaccines teach the body to fight a virus?",
    "My code raises 'list index out of range' now and then. How do I find the cause?",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "If I invest 2,000 euros at 3 percent a year, how much do I have after ten years? Show the steps.",
    "What should I pay attention to when I buy a used bicycle?",
    "Invent a dialogue between a cat and a robot vacuum cleaner that share a flat.",
    "Explain recursion with an example in Python.",
    "Which good habits help against putting things off? Give reasons.",
    "Describe how bread is made, from the grain to the loaf.",
    "Translate into French and explain the grammar: 'I would have come if you had called me.'",
    "A rectangle's length is twice its width, and its perimeter is 54 cm. What is its area?",
    "Write a SQL query for the three customers with the highest total of orders, and explain it line by line.",
    "What were the main causes of the First World War?",
    "Suggest names for a small bakery by the sea, and say what each of them evokes.",
    "How does a refrigerator make things cold?",
    "Plan a surprise birthday party for a friend who loves board games.",
    "What would change on Earth if it had no moon?",
    "Give arguments for and against homework in primary school.",
    "Write a product description for a backpack made from old sails.",
    "How do I keep a basil plant alive in the kitchen?",
    "Explain what inflation is and how a central bank can lower it.",
    "Write a Python function that tells whether a string is a palindrome, and how you would test it.",
)


def chat_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """The first ``count`` questions through the model's chat template.

    Raises:
        WorkloadUnavailableError: the model has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise WorkloadUnavailableError("the model has no chat template; take an instruct model")
    stopping = StoppingParams(max_tokens=max_tokens or MAX_TOKENS)
    prompts = []
    for number, question in enumerate(QUESTIONS[:count]):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        prompts.append(BenchPrompt(f"chat/{number}", tuple(ids), stopping))
    return prompts
