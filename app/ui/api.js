// The service's routes, the API key, and errors in the service's own words.

const KEY = "sparsefinder-key";

export class ServiceError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
}

// Answers as text: an export must be what the service said, digit for digit.
export async function request(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key && /[^\x20-\xff]/.test(key)) throw new ServiceError(401, "no_key", "the key holds characters that no header can carry");
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(0, "unreachable", "the service does not answer");
  }
  const text = await response.text();
  if (!response.ok) throw errorOf(response.status, text);
  return text;
}

function errorOf(status, text) {
  try {
    const error = JSON.parse(text).error;
    return new ServiceError(status, error.code, `${error.message} (${error.code}, request ${error.request_id})`);
  } catch {
    return new ServiceError(status, "unknown", `the service answered ${status}`);
  }
}
