// An Express site for the tests of a gateway in front of it: node express_site.cjs FOLDER
// FOLDER has node_modules. Prints the port.
const { createRequire } = require('node:module')
const load = createRequire(process.argv[2] + '/')
const express = load('express')
const session = load('express-session')

const app = express()
app.set('trust proxy', 'loopback')
app.use(session({ secret: 'for-tests', resave: false, saveUninitialized: false }))
app.use(express.urlencoded({ extended: false }))

let visits = 0
app.get('/news', (req, res) => {
  visits += 1
  res.set('Cache-Control', 'public, max-age=60')
  res.send(`news ${visits} for ${req.protocol}://${req.get('host')}`)
})

app.post('/sign-in', (req, res) => {
  if (req.get('origin') !== `${req.protocol}://${req.get('host')}`) {
    return res.status(403).send('another origin')
  }
  req.session.name = req.body.name
  res.redirect('/account')
})

app.get('/account', (req, res) => {
  res.send(req.session.name ? `account of ${req.session.name}` : 'nobody')
})

const server = app.listen(0, '127.0.0.1', () => console.log(server.address().port))
