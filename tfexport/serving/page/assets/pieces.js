// Tokens and numbers as a person reads them.

const SPACE = /[\u0120\u2581]/g; // how vocabularies of bytes and SentencePiece write a space

// Vocabularies of bytes write each byte as a character: itself where it is printable, others from U+0100 on (GPT-2).
const BYTES = new Map();
for (let byte = 0, next = 256; byte < 256; byte += 1) {
  const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  BYTES.set(String.fromCodePoint(isPrintable ? byte : next), byte);
  if (!isPrintable) next += 1;
}

// The texts of tokens. In a vocabulary of bytes a token may be a part of a character: it is shown as the vocabulary has it.
export function textsOf(tokens) {
  const isOfBytes = tokens.some((token) => token.includes("\u0120")) && !tokens.some((token) => token.includes("\u2581"));
  return tokens.map((token) => (isOfBytes ? decoded(token) : token).replace(SPACE, " ").trim() || "␣");
}

function decoded(token) {
  const bytes = [...token].map((one) => BYTES.get(one));
  if (bytes.includes(undefined)) return token;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes));
  } catch {
    return token;
  }
}

export function percent(share) {
  if (share > 0 && share < 0.0005) return "below 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

export function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

// A number as it is written in text, with a true minus sign.
export function number(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");
}

export function counted(count, one) {
  return `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;
}

// `en_GB` of a bundle's name as BCP 47 has it, and in English.
export function tagOf(code) {
  return code?.replaceAll("_", "-") ?? "";
}

export function languageOf(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(tagOf(code));
  } catch {
    return code;
  }
}
