"""Generate conversations of the model with a customer of a small shop, as in tau-bench (arXiv 2406.12045):
`--custom-generate-function-path examples/customer/generate.py`.

The model answers the customer or calls tools that change a database. It is trained on its own tokens, not on those of
customer and tools, and gets reward 1 if the final state of the database is right, whatever the model says. The customer
follows a script, or is played by another model if CUSTOMER_BASE_URL is set.

Rows have the system message as prompt, and a wish: {"prompt": "...", "metadata": {"wish": {"tool": "cancel", "order":
"a1"}}}. With "vague": true the customer does not say the number of the order at first.
"""

import copy
import json
import os

ORDERS = {
    "a1": {"item": "lamp", "status": "pending"},
    "b2": {"item": "chair", "status": "delivered"},
    "c3": {"item": "book", "status": "shipped"},
    "d4": {"item": "clock", "status": "delivered"},
}
EFFECTS = {"cancel": "cancelled", "refund": "refunded"}  # tool -> new status; tools do not check the shop's policy
NEEDED = {"cancel": "pending", "refund": "delivered"}  # tool -> status that an order must have by the shop's policy
END = "goodbye"  # in the last message of a customer


def describe_tool(name: str, description: str) -> dict:
    """Return the definition of a tool whose argument is the number of an order."""
    order = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": order}}


TOOLS = [
    describe_tool("show", "Return item and status of an order."),
    describe_tool("cancel", "Cancel an order."),
    describe_tool("refund", "Take an order back and return the money."),
]


async def generate(args, sample, sampling_params, engine):
    wish, shop = sample.metadata["wish"], Shop()
    customer = (ModelCustomer if os.environ.get("CUSTOMER_BASE_URL") else ScriptedCustomer)(wish)
    conversation = engine.conversation(sample, tools=TOOLS)
    messages = [{"role": "system", "content": sample.prompt}, {"role": "user", "content": await customer.say()}]
    for _ in range(args.max_turns):
        reply = await conversation.reply(messages)
        if sample.status != sample.Status.COMPLETED:  # the length limit was reached, or the round has ended
            break
        if calls := reply.get("tool_calls"):
            messages = [
                {"role": "tool", "tool_call_id": call["id"], "content": shop.call(**call["function"])} for call in calls
            ]
            continue
        said = await customer.say(reply["content"])
        if END in said:
            break
        messages = [{"role": "user", "content": said}]
    sample.reward = shop.reward(wish)
    return sample


class Shop:
    """The database of one conversation: number of an order -> item and status."""

    def __init__(self) -> None:
        self.orders = copy.deepcopy(ORDERS)

    def call(self, name: str, arguments: str) -> str:
        """Run a tool call of the agent. Return its result as text, or `error: ...` if the call is invalid."""
        try:
            order = self.orders[json.loads(arguments)["order"]]
        except (ValueError, KeyError, TypeError):
            return "error: unknown order"
        order["status"] = EFFECTS.get(name, order["status"])
        return f"{order['item']}, {order['status']}"

    def reward(self, wish: dict) -> float:
        """Return 1 if the database is in the state that the shop's policy demands after a customer's wish, else 0."""
        right = Shop()
        if right.orders[wish["order"]]["status"] == NEEDED[wish["tool"]]:
            right.call(wish["tool"], json.dumps({"order": wish["order"]}))
        return float(self.orders == right.orders)


class ScriptedCustomer:
    """A customer who says a wish, then the number of the order if the wish did not contain it, and goodbye.

    Args:
        wish: {"tool", "order"}, and optionally "vague": the first message has no number.
    """

    def __init__(self, wish: dict) -> None:
        number = f" {wish['order']}"
        self._lines = [f"please {wish['tool']} my order{'' if wish.get('vague') else number}", END]
        if wish.get("vague"):
            self._lines.insert(1, f"order{number}")

    async def say(self, heard: str | None = None) -> str:
        """Return the customer's next message, after `heard` from the agent (None: the first message)."""
        return self._lines.pop(0)


class ModelCustomer:
    """A customer played by a model on an OpenAI-compatible server: CUSTOMER_BASE_URL, CUSTOMER_MODEL, and the key in
    CUSTOMER_API_KEY. The arguments are those of ScriptedCustomer."""

    def __init__(self, wish: dict) -> None:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(
            base_url=os.environ["CUSTOMER_BASE_URL"], api_key=os.environ.get("CUSTOMER_API_KEY", "none")
        )
        vague = " Give the number only if you are asked for it." if wish.get("vague") else ""
        task = f"You are a customer of a shop and want to {wish['tool']} your order {wish['order']}.{vague}"
        rules = f"Write one short sentence at a time. When your wish is fulfilled or impossible, write: {END}"
        self._messages = [{"role": "system", "content": f"{task} {rules}"}]

    async def say(self, heard: str | None = None) -> str:
        """Return the customer's next message, after `heard` from the agent (None: the first message)."""
        self._messages.append({"role": "user", "content": heard or "How can I help you?"})
        model = os.environ.get("CUSTOMER_MODEL", "customer")
        reply = await self._client.chat.completions.create(model=model, messages=self._messages, max_tokens=100)
        text = reply.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": text})
        return text
