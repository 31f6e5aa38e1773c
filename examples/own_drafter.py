"""A drafter of one's own: it proposes a list of phrases that the text is expected to hold.

python examples/own_drafter.py
"""

import hf_treespec
from hf_treespec import Budget, DraftContext, Drafter, TokenTree


class Phrases(Drafter):
    """Wherever a phrase has begun, the rest of it is drafted; phrases that share a beginning become branches."""

    name = "phrases"

    def __init__(self, phrases: list[list[int]]) -> None:
        self.phrases = phrases  # token ids

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        paths = [
            phrase[at + 1 :][: budget.max_depth]
            for phrase in self.phrases
            for at, token in enumerate(phrase[:-1])
            if token == context.last_token
        ]
        return TokenTree.from_paths(context.last_token, paths).prune(budget.max_nodes, budget.max_depth, 8)


def main() -> None:
    model, tokenizer = hf_treespec.demo_model()
    months = ["January", "February", "March", "April", "May", "June"]
    months += ["July", "August", "September", "October", "November", "December"]
    phrases = [" " + ", ".join(months), " " + " and ".join(months[:2])]  # two ways in which a list may go on
    drafter = Phrases([tokenizer(text)["input_ids"] for text in phrases])
    hf_treespec.check_drafter(drafter, model, max_new_tokens=4)  # in a test of yours

    messages = [{"role": "user", "content": "List the months of the year, separated by commas."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    always = {"drafter": drafter, "fallback": False}  # verify every draft, also where it does not pay on this machine
    for record in hf_treespec.stream(model, **inputs, max_new_tokens=40, do_sample=False, tree_spec=always):
        print(f"{record.accepted} of {record.drafted} accepted:", repr(tokenizer.decode(record.committed)))


if __name__ == "__main__":
    main()
