// Runs http-cache-tests (cache-tests.fyi) against a cache: node http_suite.mjs FOLDER URL
// FOLDER is the unpacked package. Prints {id: [kind, true or what went wrong]} as JSON.
import http from 'node:http'

const [folder, base] = process.argv.slice(2)
const { runTests, getResults } = await import(`${folder}/client/runner.mjs`)
const { default: fetch } = await import(`${folder}/node_modules/node-fetch/lib/index.js`)
const { default: suites } = await import(`${folder}/tests/index.mjs`)

// A connection for each request. A kept one may be closed by the cache just as it is used again,
// and the test would fail for that.
const agent = new http.Agent({ keepAlive: false })
const fetchAlone = (url, init) => fetch(url, { ...init, agent })
await runTests(suites, fetchAlone, false, base, 90)
const kinds = new Map(suites.flatMap(suite => suite.tests.map(test => [test.id, test.kind ?? 'required'])))
const ended = Object.entries(getResults()).map(([id, how]) => [id, [kinds.get(id), how]])
console.log(JSON.stringify(Object.fromEntries(ended)))
