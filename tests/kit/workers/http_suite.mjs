// Runs http-cache-tests (cache-tests.fyi) against a cache: node http_suite.mjs FOLDER URL
// FOLDER is the unpacked package. Prints {id: [kind, true or what went wrong]} as JSON.
const [folder, base] = process.argv.slice(2)
const { runTests, getResults } = await import(`${folder}/client/runner.mjs`)
const { default: fetch } = await import(`${folder}/node_modules/node-fetch/lib/index.js`)
const { default: suites } = await import(`${folder}/tests/index.mjs`)

const AT_ONCE = 90
await runTests(suites, fetch, false, base, AT_ONCE)
const kinds = new Map(suites.flatMap(suite => suite.tests.map(test => [test.id, test.kind ?? 'required'])))
const ended = Object.entries(getResults()).map(([id, how]) => [id, [kinds.get(id), how]])
console.log(JSON.stringify(Object.fromEntries(ended)))
