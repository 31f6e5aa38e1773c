"""The same text in fewer forward passes, on the embedded SmolLM2-135M (no network, a CPU will do).

python examples/quickstart.py
"""

import torch

import hf_treespec

PROMPT = """Correct the spelling mistakes in this text and repeat the whole text:

The committee met on Tuesday to discus the new budget for the library. Several members said that the budget was to small."""


def main() -> None:
    model, tokenizer = hf_treespec.demo_model()
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    trees = model.generate(**inputs, max_new_tokens=40, do_sample=False, tree_spec=True)

    print(tokenizer.decode(trees[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print("same text:", "yes" if torch.equal(plain, trees) else "no")
    print(trees.tree_spec.explain())


if __name__ == "__main__":
    main()
