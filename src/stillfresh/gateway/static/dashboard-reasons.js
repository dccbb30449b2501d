// Why requests passed through uncached: each reason in a few words, and what it means.

const REASONS = {
  "authorization": ["sent credentials", "The request carries credentials (Authorization, X-Api-Key, …), and the response does not allow sharing."],
  "body": ["GET with a body", "A GET request with a body is never cached."],
  "busy": ["waited too long", "Another request was loading the page and took too long."],
  "changed": ["just changed", "The page was changed through its own address, and the store does not know it yet."],
  "condition": ["conditional", "Only the site can judge If-Match and If-Unmodified-Since."],
  "cookie": ["sent a cookie", "The request has a cookie, and the response does not say public or s-maxage."],
  "encoded": ["compressed", "The site compressed the page, and other services read this store's pages uncompressed."],
  "failed": ["failed before", "The last load failed. Each visitor's own request goes to the site until a load succeeds."],
  "full": ["limit reached", "A limit is reached: of hosts, queries, variants, error pages or simultaneous loads."],
  "headers": ["bad header fields", "Header fields of the request or the response are malformed, too many or too long."],
  "host": ["unknown host", "The host is not allowed, or not well-formed."],
  "hydration": ["hydration data", "The request is for the hydration data of a FaceTheory page, which only the site has."],
  "method": ["not GET or HEAD", "Only GET and HEAD requests are cached."],
  "no-freshness": ["no freshness stated", "The site does not say how long the page is fresh. Add a route, or let the site send Cache-Control."],
  "no-store": ["asked not to be stored", "The request says Cache-Control: no-store."],
  "path": ["ambiguous path", "Servers may read this path or query in different ways."],
  "private": ["marked private", "The site says Cache-Control: private or no-store."],
  "range": ["part of a page", "A part was requested of a page that is not stored."],
  "remembered": ["was not shared before", "The last answer could not be shared, so this request went to the site. This answer can be: the next visit stores it."],
  "route": ["no route", "No route names this path."],
  "same-store": ["the site's own store", "The site is a FaceTheory service that uses this cache's table and keys. The log says what to do."],
  "set-cookie": ["set a cookie", "The response sets a cookie, so it is for one visitor."],
  "site-copy": ["old page of the site", "The site answered with an old page of its own store, because it could not render a new one."],
  "site-full": ["no connection free", "All connections to the site were in use. Raise pages.site_connections, or find out which requests take long."],
  "size": ["too large", "The page is larger than max_body."],
  "status": ["status not cacheable", "Responses of this status are never stored."],
  "store": ["store unavailable", "The store did not answer."],
  "stream": ["event stream", "Event streams are never stored."],
  "tags": ["too many tags", "The site names more than 100 tags, or a very long one: the page could not be invalidated by all of its tags."],
  "vary": ["varies too much", "The response says Vary: *, or varies by a field that cannot be part of a key."],
};

/** What a healthy site does, too: the operator chose it, or a request or a response is made like that. */
const USUAL = new Set([
  "authorization", "body", "changed", "condition", "cookie", "encoded", "host", "hydration", "method", "no-freshness",
  "no-store", "path", "private", "range", "remembered", "route", "set-cookie", "status", "stream",
]);

/** How many of these requests passed for a reason that the operator should look at. */
export function needingAttention(passed) {
  return passed.reduce((all, [reason, number]) => all + (USUAL.has(reason) ? 0 : number), 0);
}

/** A few words; a reason that is not known here, as it is. */
export function wordsOf(reason) {
  return REASONS[reason]?.[0] ?? reason;
}

export function meaningOf(reason) {
  return REASONS[reason]?.[1] ?? "";
}

/** [reason, number] of each that has any, the most frequent first. */
export function ranked(bypassed) {
  return Object.entries(bypassed).filter(([, number]) => number > 0).sort(([, a], [, b]) => b - a);
}
