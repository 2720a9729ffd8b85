"""Common English words of the word game, by their length."""

FOUR = """
able acid back ball band bank bath bear beat bell belt bend bill bird bite blue boat body bold bone book boot born
bowl burn busy cake calm camp card cart case cave chin city clay clip club coal coat cold cook cool corn cost crab
crew crop crow dark dawn deep deer desk dish dive door down draw drop drum duck dust each east easy edge exit face
fact fair farm fast fear feet film fire fish five flag flat food foot fork four frog full game gate gift girl give
goat gold good grow hair half hand hard hawk head hear heat help hero high hill home hope horn hour idea inch iron
item join jump keep kind king kite knee knot lake lamp land late leaf left lift lion list live long love luck lung
mail many mark math meal milk mind moon move myth nail name near neck nest nine noon note oath once open oven over
pack page pair park path peak plan play poem pond pull push quit race rain read rest rice rich ring road rock roof
room root rope rose ruby safe sail salt sand seed ship shoe sign silk sing skin snow soap sock soft song soup spin
star stem step swim tail tall task team tent time town tree trip tuba turn ugly unit vase verb very view vote wagon
walk warm wash wave west wide wind wing wish wolf wood wool word work yard year yoga zero zone
"""

FIVE = """
about above actor adult after agent alarm album alone angel anger angle ankle apple april arena armor arrow aside
asset audio award bacon badge baker basic basin beach beard beast berry birth black blade blank blend block blood
board bonus brain brand bread brick bride brief broad brown brush build bunch cabin cable camel candy canoe cargo
carry chain chair chalk charm chart cheap chess chest chief child choir cider civic claim clean clear clerk cliff
climb clock cloth cloud coach coast cocoa color comet coral couch court cover crane cream creek crown crust curve
cycle daily dairy dance debut depth diary diner dozen draft dragon drama dream dress drink drive eagle early earth
elbow empty enemy enjoy entry equal essay event exact extra fable faith fancy feast fence fever field final flame
flock floor flour focus force forum frame fresh front frost fruit funny ghost giant glass globe glove grace grade
grain grape grass great green greet group guard guest guide habit happy heart heavy hedge hello hobby honey horse
hotel house human humor ideal image index inner input ivory jelly jewel joint judge juice kayak knife knock label
large laser laugh layer lemon level light limit linen local logic lunch lyric magic major maple march marry match
medal melon mercy metal meter minor model money month motor mount mouse mouth movie music nerve night noble noise
north novel nurse ocean offer olive onion opera orbit order other owner paint panel panic paper party peach pearl
phone photo piano piece pilot pizza place plain plane plant plate point polar pound power press price pride prize
proof proud pulse pupil queen quick quiet radio raven reach ready river robin robot rough round royal rugby rural
salad sauce scale scarf scene scout shade shape share shark sheep sheet shelf shell shirt shore short skate skill
sleep slice small smart smile smoke snake solar solid sound south space spice spoon sport spray staff stage stamp
stone storm story stove sugar sweet swing table teach thank theme thick thumb tiger title toast today tooth topic
torch total tower track trade trail train treat truck trust tulip uncle under union upper urban usual valid value
video visit vivid vocal voice wagon waist watch water whale wheat wheel white whole woman world wrist write yacht
young youth zebra
"""

SIX = """
accent action advice almond amount anchor animal answer apples artist autumn bakery ballet bamboo banana banner
barber basket beacon beauty better beyond bishop border bottle bottom branch breath breeze bridge bright bronze
bubble bucket butter button camera canyon carbon carpet carrot castle cattle center cereal chance cheese cherry
choice church circle clever closet clover coffee colony column copper corner cotton county cousin cradle cruise
custom danger debate degree desert dinner doctor dollar donkey double dragon driver effort eleven empire engine
estate expert fabric family famous farmer father finger flight flower forest formal fossil fridge friend frozen
future galaxy garage garden garlic gather gentle ginger global golden guitar hammer handle harbor health height
helmet heroic hidden honest humble hunter impact income indoor insect island jacket jungle junior kernel kettle
kitten ladder lawyer leader legend lesson letter lizard locket lumber magnet manner marble margin market meadow
member memory method middle minute mirror modern moment monkey mother motion museum muscle napkin nation native
nature needle nephew notice number object office orange orchid outfit oxygen oyster palace parade parent pencil
people pepper person pillow pirate planet player pocket poetry police potato powder public puzzle rabbit random
reason record remote repair result ribbon ripple rocket rubber saddle salmon sample school screen season secret
shadow shield shower signal silver simple singer sister sketch smooth soccer spider spirit spring square stable
statue street string studio summer sunset supper switch symbol temple tennis thread throne ticket timber tomato
tongue travel tunnel turtle valley velvet violin vision voyage wallet walnut wealth weapon weekly window winter
wisdom wizard wonder yellow
"""

WORDS: dict[int, tuple[str, ...]] = {
    length: tuple(dict.fromkeys(word for word in text.split() if len(word) == length))
    for length, text in ((4, FOUR), (5, FIVE), (6, SIX))
}
