import type { Message } from "./request";
import { busy, change, form, shown } from "./store";

const NAMES: Record<Message["role"], string> = { system: "System", user: "You", assistant: "Model" };

/** The conversation; the last answer can be appended. */
export function Messages() {
  const { messages } = form.value;
  const put = (next: Message[]) => change({ messages: next });
  const answer = !busy.value && shown.value?.state === "done" ? shown.value.text : "";
  const last = messages.at(-1);
  const keep = () => put([...messages, { role: "assistant", content: answer }, { role: "user", content: "" }]);
  return (
    <div class="messages">
      {messages.map((message, i) => (
        <div class="message" key={i}>
          <label>
            <span>{NAMES[message.role]}</span>
            <textarea
              rows={message.role === "user" && i === messages.length - 1 ? 5 : 2}
              value={message.content}
              onInput={(event) =>
                put(messages.map((old, j) => (j === i ? { ...old, content: event.currentTarget.value } : old)))
              }
            />
          </label>
          {messages.length > 1 && (
            <button
              type="button"
              class="quiet"
              aria-label={`Remove message ${i + 1}`}
              onClick={() => put(messages.filter((_, j) => j !== i))}
            >
              ✕
            </button>
          )}
        </div>
      ))}
      <div class="row">
        {messages[0]?.role !== "system" && (
          <button type="button" class="quiet" onClick={() => put([{ role: "system", content: "" }, ...messages])}>
            + System message
          </button>
        )}
        {last?.role !== "user" && (
          <button type="button" class="quiet" onClick={() => put([...messages, { role: "user", content: "" }])}>
            + Message
          </button>
        )}
        {answer && last?.role === "user" && last.content && (
          <button type="button" class="quiet" onClick={keep}>
            Continue from the answer
          </button>
        )}
      </div>
    </div>
  );
}
